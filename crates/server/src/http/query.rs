//! The query of a URL, decoded to bytes: names in a guest need not be UTF-8.

use std::{collections::BTreeMap, convert::Infallible, str::FromStr};

use axum::extract::FromRequestParts;
use http::request::Parts;

use super::fields::decoded_fields;
use crate::Error;

/// The fields in their order.
#[derive(Debug, Default)]
pub(super) struct Query(Vec<(Vec<u8>, Vec<u8>)>);

impl Query {
    pub(super) fn parse(text: &[u8]) -> Self {
        Self(decoded_fields(text))
    }

    /// # Errors
    /// 400 when it is given twice.
    pub(super) fn bytes(&self, name: &str) -> Result<Option<&[u8]>, Error> {
        let mut values =
            self.0.iter().filter(|(key, _)| key == name.as_bytes()).map(|(_, value)| &value[..]);
        let value = values.next();
        if values.next().is_some() {
            return Err(Error::invalid(format!("`{name}` is given twice")));
        }
        Ok(value)
    }

    /// # Errors
    /// 400 when it is given twice or is not UTF-8.
    pub(super) fn text(&self, name: &str) -> Result<Option<&str>, Error> {
        let not_text = |_| Error::invalid(format!("`{name}` must be UTF-8"));
        self.bytes(name)?.map(|value| std::str::from_utf8(value).map_err(not_text)).transpose()
    }

    /// Missing and empty are alike.
    ///
    /// # Errors
    /// 400 when it is no number of this kind.
    pub(super) fn number<N: FromStr>(&self, name: &str) -> Result<Option<N>, Error> {
        let Some(text) = self.text(name)?.filter(|text| !text.is_empty()) else { return Ok(None) };
        text.parse()
            .map(Some)
            .map_err(|_| Error::invalid(format!("`{name}` must be a whole number")))
    }

    /// # Errors
    /// 400 when it is neither yes nor no.
    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool, Error> {
        match self.text(name)?.map(str::to_ascii_lowercase).as_deref() {
            None => Ok(default),
            Some("true" | "1" | "yes" | "") => Ok(true),
            Some("false" | "0" | "no") => Ok(false),
            Some(_) => Err(Error::invalid(format!("`{name}` must be `true` or `false`"))),
        }
    }

    /// `prefix.KEY=VALUE`, all of them.
    ///
    /// # Errors
    /// 400 when one is not UTF-8.
    pub(super) fn map(&self, prefix: &str) -> Result<BTreeMap<String, String>, Error> {
        let not_text = |_| Error::invalid(format!("`{prefix}…` must be UTF-8"));
        let mut map = BTreeMap::new();
        for (name, value) in &self.0 {
            if let Some(key) = name.strip_prefix(prefix.as_bytes()) {
                let key = String::from_utf8(key.to_vec()).map_err(not_text)?;
                map.insert(key, String::from_utf8(value.clone()).map_err(not_text)?);
            }
        }
        Ok(map)
    }
}

impl<S: Sync> FromRequestParts<S> for Query {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self::parse(parts.uri.query().unwrap_or_default().as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_survive_their_encoding(value in prop::collection::vec(any::<u8>(), 0..80), other in "[a-z+]{0,5}") {
            let query = format!("other={other}&path={}", percent_encode(&value, NON_ALPHANUMERIC));
            let parsed = Query::parse(query.as_bytes());
            prop_assert_eq!(parsed.bytes("path").unwrap(), Some(&value[..]));
            // As Python's `urlencode` writes spaces.
            let query = format!("path={}", percent_encode(&value, NON_ALPHANUMERIC)).replace("%20", "+");
            let parsed = Query::parse(query.as_bytes());
            prop_assert_eq!(parsed.bytes("path").unwrap(), Some(&value[..]));
        }

        #[test]
        fn any_query_is_parsed_or_refused_without_a_panic(text in prop::collection::vec(any::<u8>(), 0..80)) {
            let query = Query::parse(&text);
            let _ = (query.bytes("path"), query.number::<u64>("limit"), query.flag("follow", true), query.map("metadata."));
        }
    }

    #[test]
    fn a_field_given_twice_is_refused() {
        assert!(Query::parse(b"path=/a&path=/b").bytes("path").is_err());
        assert_eq!(Query::parse(b"path=/a&path2=/b").bytes("path").unwrap(), Some(&b"/a"[..]));
    }

    #[test]
    fn metadata_is_gathered_by_its_prefix() {
        let query = Query::parse(b"metadata.job=a%20b&metadata.x.y=&status=running");
        let expected =
            [("job", "a b"), ("x.y", "")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(query.map("metadata.").unwrap(), BTreeMap::from(expected));
    }
}
