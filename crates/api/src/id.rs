//! Ids are types, made from text once, at the edge.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} must be {rule}")]
pub struct InvalidId {
    what: &'static str,
    rule: &'static str,
}

macro_rules! uuid_id {
    ($(#[$meta:meta])* $name:ident, $what:literal) => {
        $(#[$meta])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
        )]
        #[serde(transparent)]
        pub struct $name(uuid::Uuid);

        impl $name {
            pub fn random() -> Self {
                Self(uuid::Uuid::new_v4())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.hyphenated().fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;
            fn from_str(text: &str) -> Result<Self, InvalidId> {
                uuid::Uuid::try_parse(text)
                    .map(Self)
                    .map_err(|_| InvalidId { what: $what, rule: "a UUID" })
            }
        }
    };
}

uuid_id!(
    /// A UUID. Becomes part of file names.
    SandboxId, "a sandbox id"
);
uuid_id!(
    /// A UUID. Becomes part of file names.
    SnapshotId, "a snapshot id"
);
uuid_id!(
    /// A UUID. Becomes part of file names.
    VolumeId, "a volume id"
);
uuid_id!(
    /// A UUID; the same as its sandbox's.
    DatabaseId, "a database id"
);

impl DatabaseId {
    /// The sandbox that the database is.
    pub fn sandbox(self) -> SandboxId {
        SandboxId(self.0)
    }
}

uuid_id!(
    /// Names a preview token without being one.
    PreviewTokenId, "a preview token's id"
);

uuid_id!(
    /// A UUID.
    TerminalId, "a terminal id"
);

/// Ids become file names, so nothing that a path could interpret gets in.
fn is_plain(text: &str, longest: usize) -> bool {
    (1..=longest).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && text != "."
        && text != ".."
}

macro_rules! text_id {
    ($(#[$meta:meta])* $name:ident, $what:literal, $longest:literal, $rule:literal) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
        #[serde(try_from = "String", into = "String")]
        #[schema(value_type = String)]
        pub struct $name(String);

        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;
            fn from_str(text: &str) -> Result<Self, InvalidId> {
                if is_plain(text, $longest) { Ok(Self(text.to_owned())) } else { Err(InvalidId { what: $what, rule: $rule }) }
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(text: String) -> Result<Self, InvalidId> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0
            }
        }
    };
}

text_id!(
    /// Who owns. A self-hoster's only one is `default`.
    AccountId, "an account id", 64, "1 to 64 letters, digits, `-`, `_` or `.`"
);
text_id!(
    /// Chosen by the caller or made by the server.
    ExecId, "an exec id", 128, "1 to 128 letters, digits, `-`, `_` or `.`"
);
text_id!(
    /// Names a key without being one.
    KeyId, "a key id", 64, "1 to 64 letters, digits, `-`, `_` or `.`"
);
text_id!(
    /// Names a template for people.
    TemplateName, "a template name", 64, "1 to 64 letters, digits, `-`, `_` or `.`"
);
text_id!(
    /// Names a volume for people, once in an account.
    VolumeName, "a volume name", 64, "1 to 64 letters, digits, `-`, `_` or `.`"
);

impl AccountId {
    /// The account of a self-hoster.
    pub fn default_account() -> Self {
        Self("default".to_owned())
    }
}

impl ExecId {
    pub fn random() -> Self {
        Self(uuid::Uuid::new_v4().simple().to_string())
    }
}

impl KeyId {
    pub fn random() -> Self {
        Self(uuid::Uuid::new_v4().simple().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_cannot_leave_its_directory() {
        for bad in ["", ".", "..", "a/b", "../x", "a\0b", "é", &"x".repeat(65)] {
            assert!(bad.parse::<TemplateName>().is_err(), "{bad:?}");
            assert!(bad.parse::<SandboxId>().is_err(), "{bad:?}");
            assert!(bad.parse::<SnapshotId>().is_err(), "{bad:?}");
            assert!(bad.parse::<VolumeId>().is_err(), "{bad:?}");
        }
        assert!("ubuntu-24.04".parse::<TemplateName>().is_ok());
    }
}
