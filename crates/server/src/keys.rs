//! Keys: made, recognized, revoked. Only their SHA-256 is kept; a key itself is shown once.

use std::{
    collections::HashMap,
    fmt::Debug,
    str::FromStr,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use api::{AccountId, CreateKey, Key, KeyId, NewKey, Scope};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::{sync::Mutex, time::Instant};
use uuid::Uuid;

use crate::{
    Error,
    account::{Plan, Plans},
    clock::{self, Clock},
    db::{Db, KeyRow},
    ticket::Ticket,
};

/// By which a leaked key is recognized as ours.
pub(crate) const MARK: &str = "atl_";
/// Random bytes of a key.
const SECRET: usize = 40;
/// Characters shown in lists: the mark, and eight that leave 272 random bits unshown.
const PREFIX: usize = MARK.len() + 8;
const LONGEST_LABEL: usize = 200;
const LONGEST_EXPIRY_DAYS: u32 = 3650;
/// What another process wrote (`atoll key revoke`) is noticed after so long at the latest.
const FRESH: Duration = Duration::from_secs(1);
/// While the database does not answer, what was known goes on for so long.
const STALE: Duration = Duration::from_secs(60);

type Hash = [u8; 32];

/// Who asks, and what they may.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    pub account: AccountId,
    pub scope: Scope,
    pub plan: Arc<Plan>,
    /// Of a request with an `Idempotency-Key`.
    pub ticket: Option<Ticket>,
}

impl Caller {
    fn new(account: AccountId, scope: Scope, plan: Arc<Plan>) -> Self {
        Self { account, scope, plan, ticket: None }
    }

    /// For what the server goes on with by itself: it was admitted before.
    pub(crate) fn of_server(account: &AccountId) -> Self {
        Self::new(account.clone(), Scope::Full, Arc::new(Plan::unlimited()))
    }

    #[cfg(test)]
    pub(crate) fn testing() -> Self {
        Self::new(AccountId::default_account(), Scope::Full, Arc::new(Plan::unlimited()))
    }

    /// For the so-manieth thing that the request makes.
    pub(crate) fn new_id<T: FromStr<Err: Debug>>(&self, place: usize) -> T {
        self.ticket.unwrap_or_else(|| Ticket::new(Uuid::new_v4(), false)).id(place)
    }

    /// What the request makes may be there already, under [`Caller::new_id`].
    pub(crate) fn asks_again(&self) -> bool {
        self.ticket.is_some_and(|ticket| ticket.again)
    }
}

pub struct Keys {
    db: Db,
    clock: Clock,
    plans: Arc<Plans>,
    /// Of the setting's key: full scope, the default account.
    fixed: Option<Hash>,
    known: RwLock<Arc<Known>>,
    /// Held while rows are read, so that a thousand requests at once read them once.
    reading: Mutex<()>,
}

/// The keys as they were at one time.
struct Known {
    read: Instant,
    /// Of the default account, which has the setting's key.
    default_plan: Arc<Plan>,
    /// By the first bytes of their hashes; the rest is compared in constant time.
    keys: HashMap<[u8; 8], Vec<(Hash, KnownKey)>>,
}

#[derive(Clone)]
struct KnownKey {
    caller: Caller,
    expires_at: Option<i64>,
}

impl Keys {
    /// With the first key, where there was none at all and the setting names none either.
    ///
    /// # Errors
    /// The rows cannot be read.
    pub async fn open(
        db: Db,
        clock: Clock,
        fixed: Option<String>,
        plans: Arc<Plans>,
    ) -> Result<(Self, Option<String>), Error> {
        let keys = Self::load(db, clock, fixed, plans).await?;
        let has_none = keys.known.read().unwrap_or_else(PoisonError::into_inner).keys.is_empty();
        if !has_none || keys.fixed.is_some() {
            return Ok((keys, None));
        }
        let request = CreateKey { label: Some("first key".to_owned()), ..CreateKey::default() };
        let first = keys.create(&AccountId::default_account(), request).await?;
        Ok((keys, Some(first.token)))
    }

    /// The keys there are, none made.
    ///
    /// # Errors
    /// The rows cannot be read.
    pub(crate) async fn load(
        db: Db,
        clock: Clock,
        fixed: Option<String>,
        plans: Arc<Plans>,
    ) -> Result<Self, Error> {
        let known = Known::read(&db, &plans).await?;
        let fixed = fixed.filter(|key| !key.is_empty()).map(|key| hash(&key));
        let known = RwLock::new(Arc::new(known));
        Ok(Self { db, clock, plans, fixed, known, reading: Mutex::new(()) })
    }

    /// # Errors
    /// 401 when it is no key, revoked, or expired.
    pub async fn verify(&self, key: &str) -> Result<Caller, Error> {
        let hash = hash(key);
        if self.fixed.is_some_and(|fixed| bool::from(fixed.ct_eq(&hash))) {
            // Valid whatever becomes of the database.
            let known = self.fresh().await.unwrap_or_else(|_| self.known());
            let plan = Arc::clone(&known.default_plan);
            return Ok(Caller::new(AccountId::default_account(), Scope::Full, plan));
        }
        let known = self.fresh().await?;
        let key = known.find(&hash).ok_or_else(unauthenticated)?;
        if key.expires_at.is_some_and(|end| end <= self.clock.now_ms()) {
            return Err(Error::new(
                api::ErrorCode::Unauthenticated,
                "the key has expired; create another",
            ));
        }
        Ok(key.caller.clone())
    }

    /// # Errors
    /// 400 names the bad field.
    pub async fn create(&self, account: &AccountId, request: CreateKey) -> Result<NewKey, Error> {
        self.create_as(KeyId::random(), account, request).await
    }

    /// # Errors
    /// 400 names the bad field.
    pub(crate) async fn create_for(
        &self,
        caller: &Caller,
        request: CreateKey,
    ) -> Result<NewKey, Error> {
        let id: KeyId = caller.new_id(0);
        if caller.asks_again() {
            // Shown to nobody.
            self.db.delete_keys(&caller.account, id.as_str()).await?;
        }
        self.create_as(id, &caller.account, request).await
    }

    async fn create_as(
        &self,
        id: KeyId,
        account: &AccountId,
        request: CreateKey,
    ) -> Result<NewKey, Error> {
        let label = request.label.unwrap_or_default();
        if label.len() > LONGEST_LABEL || label.chars().any(char::is_control) {
            return Err(Error::invalid(
                "`label` may have at most 200 bytes, without control characters",
            ));
        }
        let created_at = self.clock.now_ms();
        let expires_at = match request.expires_in_days {
            None => None,
            Some(days) if (1..=LONGEST_EXPIRY_DAYS).contains(&days) => {
                Some(created_at + i64::from(days) * 86_400_000)
            }
            Some(_) => {
                return Err(Error::invalid(
                    "`expires_in_days` must be between 1 and 3650; leave it out for a key without end",
                ));
            }
        };
        let token =
            format!("{MARK}{}", BASE64_URL_SAFE_NO_PAD.encode(rand::random::<[u8; SECRET]>()));
        let row = KeyRow {
            id,
            account: account.clone(),
            label,
            prefix: token[..PREFIX].to_owned(),
            hash: hexadecimal(&hash(&token)),
            scope: request.scope.unwrap_or_default(),
            created_at,
            expires_at,
        };
        self.db.insert_key(&row).await?;
        self.read().await?;
        Ok(NewKey { token, key: shown(row) })
    }

    /// Oldest first.
    ///
    /// # Errors
    /// The rows cannot be read.
    pub async fn list(&self, account: &AccountId) -> Result<Vec<Key>, Error> {
        Ok(self
            .db
            .keys()
            .await?
            .into_iter()
            .filter(|row| row.account == *account)
            .map(shown)
            .collect())
    }

    /// By id or by prefix. From its return on, the key is refused.
    ///
    /// # Errors
    /// 404 when there is none.
    pub async fn revoke(&self, account: &AccountId, id_or_prefix: &str) -> Result<(), Error> {
        if self.db.delete_keys(account, id_or_prefix).await? == 0 {
            return Err(Error::not_found(
                "there is no key with this id or prefix; list them with GET /v1/me/tokens",
            ));
        }
        self.read().await
    }

    async fn fresh(&self) -> Result<Arc<Known>, Error> {
        let known = self.known();
        if known.read.elapsed() < FRESH {
            return Ok(known);
        }
        let _turn = self.reading.lock().await;
        let known = self.known();
        if known.read.elapsed() < FRESH {
            return Ok(known);
        }
        match self.read().await {
            Ok(()) => Ok(self.known()),
            Err(error) if known.read.elapsed() < STALE => {
                tracing::warn!(
                    cause = error.source.as_deref().map(tracing::field::display),
                    "keys cannot be read; going on with those known"
                );
                Ok(known)
            }
            Err(error) => Err(error),
        }
    }

    async fn read(&self) -> Result<(), Error> {
        let known = Arc::new(Known::read(&self.db, &self.plans).await?);
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = known;
        Ok(())
    }

    fn known(&self) -> Arc<Known> {
        Arc::clone(&self.known.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Known {
    async fn read(db: &Db, plans: &Plans) -> Result<Self, Error> {
        // Taken before the rows: what is written meanwhile is read the next time.
        let read = Instant::now();
        let accounts = db.accounts().await?;
        let plan_of = |account: &AccountId| plans.plan_of(account, &accounts);
        let mut keys: HashMap<[u8; 8], Vec<(Hash, KnownKey)>> = HashMap::new();
        for row in db.keys().await? {
            let Some(hash) = from_hexadecimal(&row.hash) else {
                return Err(Error::internal(format!("the hash of key {} is unreadable", row.id)));
            };
            let plan = plan_of(&row.account);
            let key = KnownKey {
                caller: Caller::new(row.account, row.scope, plan),
                expires_at: row.expires_at,
            };
            keys.entry(start(&hash)).or_default().push((hash, key));
        }
        Ok(Self { read, default_plan: plan_of(&AccountId::default_account()), keys })
    }

    fn find(&self, hash: &Hash) -> Option<&KnownKey> {
        self.keys
            .get(&start(hash))?
            .iter()
            .find(|(known, _)| bool::from(known.ct_eq(hash)))
            .map(|(_, key)| key)
    }
}

/// For a request without a key, or with one that is none.
pub fn unauthenticated() -> Error {
    Error::new(
        api::ErrorCode::Unauthenticated,
        "a valid key is needed: send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`",
    )
}

fn shown(row: KeyRow) -> Key {
    Key {
        id: row.id,
        label: row.label,
        prefix: row.prefix,
        scope: row.scope,
        created_at: clock::from_ms(row.created_at),
        expires_at: row.expires_at.map(clock::from_ms),
    }
}

fn hash(key: &str) -> Hash {
    Sha256::digest(key.as_bytes()).into()
}

fn start(hash: &Hash) -> [u8; 8] {
    let mut start = [0; 8];
    start.copy_from_slice(&hash[..8]);
    start
}

fn hexadecimal(hash: &Hash) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hexadecimal(text: &str) -> Option<Hash> {
    let mut hash = [0; 32];
    if text.len() != 64 {
        return None;
    }
    for (index, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::testing;

    const DAY: i64 = 86_400_000;

    async fn keys(database: &testing::Database, clock: &Clock) -> Keys {
        let db = Db::connect(database.url()).await.unwrap();
        Keys::open(db, clock.clone(), Some("the setting's".to_owned()), Arc::default())
            .await
            .unwrap()
            .0
    }

    async fn is_refused(keys: &Keys, key: &str) -> bool {
        keys.verify(key).await.is_err_and(|error| error.code == api::ErrorCode::Unauthenticated)
    }

    #[tokio::test]
    async fn a_key_is_valid_until_it_is_revoked() {
        let (database, account) = (testing::sqlite(), AccountId::default_account());
        let keys = keys(&database, &Clock::held_at(DAY)).await;
        let new = keys
            .create(&account, CreateKey { scope: Some(Scope::Read), ..CreateKey::default() })
            .await
            .unwrap();
        assert!(new.token.starts_with(&new.key.prefix) && new.token.len() >= 4 + 43);
        assert_eq!(
            keys.verify(&new.token).await.unwrap(),
            Caller::new(account.clone(), Scope::Read, Arc::new(Plan::unlimited()))
        );
        assert!(is_refused(&keys, &new.token[..new.token.len() - 1]).await);
        assert_eq!(keys.list(&account).await.unwrap().len(), 1);

        keys.revoke(&account, &new.key.prefix).await.unwrap();
        assert!(is_refused(&keys, &new.token).await);
        assert_eq!(
            keys.revoke(&account, &new.key.prefix).await.unwrap_err().code,
            api::ErrorCode::NotFound
        );
    }

    #[tokio::test]
    async fn the_key_of_the_setting_is_valid_whatever_others_exist() {
        let (database, account) = (testing::sqlite(), AccountId::default_account());
        let keys = keys(&database, &Clock::held_at(DAY)).await;
        assert_eq!(keys.verify("the setting's").await.unwrap().scope, Scope::Full);
        keys.create(&account, CreateKey::default()).await.unwrap();
        assert_eq!(keys.verify("the setting's").await.unwrap().scope, Scope::Full);
        assert!(is_refused(&keys, "").await);
    }

    #[tokio::test]
    async fn an_empty_setting_is_no_key() {
        let database = testing::sqlite();
        let db = Db::connect(database.url()).await.unwrap();
        let (keys, _) =
            Keys::open(db, Clock::default(), Some(String::new()), Arc::default()).await.unwrap();
        assert!(is_refused(&keys, "").await);
    }

    #[tokio::test]
    async fn a_new_server_without_a_setting_has_one_key_and_tells_it_once() {
        let database = testing::sqlite();
        let db = Db::connect(database.url()).await.unwrap();
        let (keys, first) =
            Keys::open(db.clone(), Clock::default(), None, Arc::default()).await.unwrap();
        assert_eq!(keys.verify(&first.unwrap()).await.unwrap().scope, Scope::Full);
        assert_eq!(Keys::open(db, Clock::default(), None, Arc::default()).await.unwrap().1, None);
    }

    #[tokio::test]
    async fn a_key_ends_with_its_last_day() {
        let (database, clock) = (testing::sqlite(), Clock::held_at(DAY));
        let keys = keys(&database, &clock).await;
        let request = CreateKey { expires_in_days: Some(2), ..CreateKey::default() };
        let new = keys.create(&AccountId::default_account(), request).await.unwrap();
        clock.advance(2 * DAY - 1);
        assert!(keys.verify(&new.token).await.is_ok());
        clock.advance(1);
        assert!(is_refused(&keys, &new.token).await);
    }

    #[tokio::test]
    async fn another_process_revokes_a_key_within_moments() {
        let (database, account) = (testing::sqlite(), AccountId::default_account());
        let (ours, theirs) =
            (keys(&database, &Clock::default()).await, keys(&database, &Clock::default()).await);
        let new = theirs.create(&account, CreateKey::default()).await.unwrap();
        let noticed = async |valid: bool| {
            while ours.verify(&new.token).await.is_ok() != valid {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(2 * FRESH, noticed(true)).await.expect("a new key is noticed");
        theirs.revoke(&account, new.key.id.as_str()).await.unwrap();
        tokio::time::timeout(2 * FRESH, noticed(false)).await.expect("a revoked key is noticed");
    }

    #[tokio::test]
    async fn only_the_hash_of_a_key_is_kept() {
        let database = testing::sqlite();
        let keys = keys(&database, &Clock::default()).await;
        let new = keys.create(&AccountId::default_account(), CreateKey::default()).await.unwrap();
        let rows = keys.db.keys().await.unwrap();
        assert!(!format!("{rows:?}").contains(&new.token[PREFIX..]));
    }
}
