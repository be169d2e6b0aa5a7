//! Keys, and who the present one belongs to.

use api::{CreateKey, Key, Me, NewKey, Quotas, Usage};
use reqwest::Method;
use serde::Deserialize;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{Client, Error, escaped};

impl Client {
    pub async fn me(&self) -> Result<Me, Error> {
        self.json(self.request(Method::GET, "/v1/me")).await
    }

    pub async fn keys(&self) -> Result<Vec<Key>, Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Keys {
            Bare(Vec<Key>),
            Wrapped { items: Vec<Key> },
        }
        Ok(match self.json(self.request(Method::GET, "/v1/me/tokens")).await? {
            Keys::Bare(keys) | Keys::Wrapped { items: keys } => keys,
        })
    }

    /// The only time that the key itself is told.
    pub async fn create_key(&self, request: &CreateKey) -> Result<NewKey, Error> {
        self.json(self.request(Method::POST, "/v1/me/tokens").json(request)).await
    }

    pub async fn quotas(&self) -> Result<Quotas, Error> {
        self.json(self.request(Method::GET, "/v1/quotas")).await
    }

    /// By default of this month until now.
    pub async fn usage(
        &self,
        from: Option<OffsetDateTime>,
        to: Option<OffsetDateTime>,
    ) -> Result<Usage, Error> {
        let named = [("from", from), ("to", to)];
        let times: Vec<_> = named
            .into_iter()
            .filter_map(|(name, time)| Some((name, time?.format(&Rfc3339).ok()?)))
            .collect();
        self.json(self.request(Method::GET, "/v1/usage").query(&times)).await
    }

    /// `key` is its prefix or its id.
    pub async fn revoke_key(&self, key: &str) -> Result<(), Error> {
        self.send(self.request(Method::DELETE, &format!("/v1/me/tokens/{}", escaped(key))))
            .await
            .map(drop)
    }
}
