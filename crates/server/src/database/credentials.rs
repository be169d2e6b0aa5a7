//! Names and passwords of a database: random, and its own.

use std::fmt;

use postgres_protocol::password::scram_sha_256;
use rand::{Rng, distr::Alphanumeric};
use serde::{Deserialize, Serialize};

const PASSWORD: usize = 32;
const NAME: usize = 12;

/// The server's own role, a superuser.
pub(super) const ADMIN: &str = "atoll";

/// Letters and digits alone, so that neither SQL nor a URL has anything to escape.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Credentials {
    pub(crate) role: String,
    pub(crate) password: String,
    pub(crate) database: String,
    /// Of [`ADMIN`].
    pub(crate) admin_password: String,
}

/// Passwords are in no log line.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("role", &self.role)
            .field("database", &self.database)
            .finish_non_exhaustive()
    }
}

impl Credentials {
    pub(crate) fn random() -> Self {
        Self {
            role: format!("u_{}", name()),
            password: password(),
            database: format!("d_{}", name()),
            admin_password: password(),
        }
    }

    /// What `templates/postgres.toml` makes. They are valid until a database has its own, before anybody else reaches it.
    pub(crate) fn of_template() -> Self {
        Self {
            role: "blank".to_owned(),
            password: String::new(),
            database: "blank".to_owned(),
            admin_password: "template".to_owned(),
        }
    }

    /// The same names with other passwords.
    pub(crate) fn renewed(&self) -> Self {
        Self { password: password(), admin_password: password(), ..self.clone() }
    }
}

fn name() -> String {
    random(NAME).to_lowercase()
}

fn password() -> String {
    random(PASSWORD)
}

fn random(length: usize) -> String {
    rand::rng().sample_iter(Alphanumeric).take(length).map(char::from).collect()
}

/// As PostgreSQL keeps it: the password itself reaches neither the guest nor its log.
pub(super) fn verifier(password: &str) -> String {
    scram_sha_256(password.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_database_has_its_own_and_none_has_to_be_escaped() {
        let (one, other) = (Credentials::random(), Credentials::random());
        for (mine, others) in [
            (&one.role, &other.role),
            (&one.password, &other.password),
            (&one.database, &other.database),
            (&one.admin_password, &other.admin_password),
        ] {
            assert_ne!(mine, others);
            assert!(mine.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'));
        }
        assert!(!format!("{one:?}").contains(&one.password));
        let renewed = one.renewed();
        assert_eq!((&renewed.role, &renewed.database), (&one.role, &one.database));
        assert_ne!(renewed.password, one.password);
        assert!(verifier("x").starts_with("SCRAM-SHA-256$"));
    }
}
