//! A key for whoever holds the host: written into the rows, whether a server runs or not.

use api::{AccountId, CreateKey, ErrorCode, NewKey};
use store::layout::Layout;

use crate::{Config, Error, clock::Clock, db::Db, keys::Keys};

/// A running server notices the key within a second.
///
/// # Errors
/// The database cannot be opened; a bad field.
pub async fn create_key(config: &Config, request: CreateKey) -> Result<NewKey, Error> {
    Layout::create(&config.data_dir, &config.cache_dir).map_err(Error::internal)?;
    let db = Db::connect(&config.database_url()).await.map_err(|source| {
        Error::new(ErrorCode::InvalidRequest, "cannot open the database; check --database")
            .because(source)
    })?;
    let keys = Keys::load(db.clone(), Clock::default(), None).await?;
    let new = keys.create(&AccountId::default_account(), request).await;
    db.close().await;
    new
}
