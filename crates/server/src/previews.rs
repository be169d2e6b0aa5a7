//! Preview tokens: signed, so that what is no token of ours costs no look at the rows; with a row each, so that they can be
//! revoked. A token opens one port of one sandbox and nothing else.

use api::{ErrorCode, NewPreviewToken, PreviewToken, PreviewTokenId, SandboxId};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use uuid::Uuid;

use crate::{
    Error,
    clock::{self, Clock},
    db::{Db, PreviewRow},
    keys::Caller,
};

/// By which a leaked token is recognized as ours.
pub(crate) const MARK: &str = "atp_";
const SECRET: &str = "preview tokens";
const DEFAULT_TTL: i64 = 3600;
const LONGEST_TTL: i64 = 30 * 86_400;
/// Of one sandbox at once.
const MOST: usize = 1000;
/// Id, end, signature.
const LENGTH: usize = 16 + 8 + 32;

pub struct Previews {
    db: Db,
    clock: Clock,
    secret: [u8; 32],
}

impl Previews {
    /// # Errors
    /// The rows cannot be read.
    pub(crate) async fn open(db: Db, clock: Clock) -> Result<Self, Error> {
        let new = BASE64_URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>());
        let secret = BASE64_URL_SAFE_NO_PAD.decode(db.secret(SECRET, &new).await?);
        let secret = secret.map_err(Error::internal)?.try_into();
        let secret = secret.map_err(|_| Error::internal("the secret of preview tokens is cut"))?;
        Ok(Self { db, clock, secret })
    }

    /// # Errors
    /// 400 names the bad field, 409 when there are too many.
    pub(crate) async fn create(
        &self,
        caller: &Caller,
        sandbox: SandboxId,
        port: u16,
        ttl_seconds: Option<i64>,
    ) -> Result<NewPreviewToken, Error> {
        let ttl = ttl_seconds.unwrap_or(DEFAULT_TTL);
        if !(1..=LONGEST_TTL).contains(&ttl) {
            return Err(Error::invalid(format!(
                "`ttl_seconds` must be between 1 and {LONGEST_TTL} (30 days)"
            )));
        }
        let created_at = self.clock.now_ms();
        let id: PreviewTokenId = caller.new_id(0);
        if caller.asks_again() {
            // Shown to nobody.
            self.db.delete_preview(&sandbox, &id).await?;
        }
        self.db.delete_previews_before(&sandbox, created_at).await?;
        if self.db.previews(&sandbox).await?.len() >= MOST {
            return Err(Error::conflict(format!(
                "this sandbox has {MOST} preview tokens; revoke some, or let them expire"
            )));
        }
        let row = PreviewRow { id, sandbox, port, created_at, expires_at: created_at + ttl * 1000 };
        self.db.insert_preview(&row).await?;
        Ok(NewPreviewToken {
            token: self.token(&row)?,
            path: format!("/v1/sandboxes/{sandbox}/proxy/{port}/"),
            host: None,
            preview: shown(&row),
        })
    }

    /// Oldest first, without those that have ended.
    pub(crate) async fn list(&self, sandbox: &SandboxId) -> Result<Vec<PreviewToken>, Error> {
        let rows = self.db.previews(sandbox).await?;
        let now = self.clock.now_ms();
        Ok(rows.iter().filter(|row| row.expires_at > now).map(shown).collect())
    }

    /// From its return on, the token is refused. Idempotent.
    pub(crate) async fn revoke(
        &self,
        sandbox: &SandboxId,
        id: &PreviewTokenId,
    ) -> Result<(), Error> {
        self.db.delete_preview(sandbox, id).await
    }

    /// # Errors
    /// 401 when it is none, of another port or sandbox, expired or revoked.
    pub(crate) async fn verify(
        &self,
        token: &str,
        sandbox: &SandboxId,
        port: u16,
    ) -> Result<(), Error> {
        let (id, expires_at) = self.read(token, sandbox, port).ok_or_else(refused)?;
        if expires_at <= self.clock.now_ms() || !self.db.has_preview(&id).await? {
            return Err(refused());
        }
        Ok(())
    }

    fn token(&self, row: &PreviewRow) -> Result<String, Error> {
        let id = Uuid::try_parse(&row.id.to_string()).map_err(Error::internal)?;
        let mut bytes = Vec::with_capacity(LENGTH);
        bytes.extend_from_slice(id.as_bytes());
        bytes.extend_from_slice(&row.expires_at.to_be_bytes());
        let signature = self.signed(&bytes, &row.sandbox, row.port).finalize().into_bytes();
        bytes.extend_from_slice(&signature);
        Ok(format!("{MARK}{}", BASE64_URL_SAFE_NO_PAD.encode(bytes)))
    }

    fn read(&self, token: &str, sandbox: &SandboxId, port: u16) -> Option<(PreviewTokenId, i64)> {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(token.strip_prefix(MARK)?).ok()?;
        let (said, signature) = bytes.split_at_checked(LENGTH - 32)?;
        self.signed(said, sandbox, port).verify_slice(signature).ok()?;
        let (id, expires_at) = said.split_at_checked(16)?;
        let id = Uuid::from_slice(id).ok()?.to_string().parse().ok()?;
        Some((id, i64::from_be_bytes(expires_at.try_into().ok()?)))
    }

    fn signed(&self, said: &[u8], sandbox: &SandboxId, port: u16) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.secret)
            .expect("a signature can be made with a secret of any length");
        mac.update(said);
        mac.update(sandbox.to_string().as_bytes());
        mac.update(&port.to_be_bytes());
        mac
    }
}

fn refused() -> Error {
    Error::new(
        ErrorCode::Unauthenticated,
        "this preview token is not valid for this port of this sandbox, has expired, or was revoked; ask for another",
    )
}

fn shown(row: &PreviewRow) -> PreviewToken {
    PreviewToken {
        id: row.id,
        port: row.port,
        created_at: clock::from_ms(row.created_at),
        expires_at: clock::from_ms(row.expires_at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::testing;

    #[tokio::test]
    async fn a_token_opens_its_port_until_it_ends() {
        let database = testing::sqlite();
        let db = Db::connect(database.url()).await.unwrap();
        let clock = Clock::held_at(1_700_000_000_000);
        let previews = Previews::open(db.clone(), clock.clone()).await.unwrap();
        let (caller, sandbox) = (Caller::testing(), SandboxId::random());
        let new = async |ttl| previews.create(&caller, sandbox, 8080, ttl).await;
        let (short, long) = (new(Some(60)).await.unwrap(), new(None).await.unwrap());
        let opens = async |token: &str, port| {
            previews.verify(token, &sandbox, port).await.map_err(|error| error.code)
        };
        let closed = Err(ErrorCode::Unauthenticated);
        assert_eq!(opens(&short.token, 8080).await, Ok(()));
        assert_eq!(opens(&short.token, 8081).await, closed);
        assert!(previews.verify(&short.token, &SandboxId::random(), 8080).await.is_err());
        // Every single character counts.
        for at in 0..short.token.len() {
            let mut other = short.token.clone().into_bytes();
            other[at] = if other[at] == b'A' { b'B' } else { b'A' };
            assert_eq!(opens(&String::from_utf8(other).unwrap(), 8080).await, closed, "{at}");
        }
        for none in ["", MARK, "atp_AAAA", "atl_x"] {
            assert_eq!(opens(none, 8080).await, closed);
        }
        clock.advance(60_000);
        assert_eq!(opens(&short.token, 8080).await, closed);
        assert_eq!(opens(&long.token, 8080).await, Ok(()));
        assert_eq!(previews.list(&sandbox).await.unwrap(), std::slice::from_ref(&long.preview));

        // Another server of the same rows knows it, too.
        let again = Previews::open(db.clone(), clock.clone()).await.unwrap();
        assert!(again.verify(&long.token, &sandbox, 8080).await.is_ok());
        previews.revoke(&sandbox, &long.preview.id).await.unwrap();
        assert!(again.verify(&long.token, &sandbox, 8080).await.is_err());
        for bad in [0, -1, LONGEST_TTL + 1] {
            assert_eq!(new(Some(bad)).await.map(drop).unwrap_err().code, ErrorCode::InvalidRequest);
        }
        db.close().await;
    }
}
