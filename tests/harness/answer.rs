//! HTTP as it is on the wire, where the client would hide it.

use bytes::Bytes;
use client::{RequestBuilder, Response};
use reqwest::header::HeaderMap;
use serde_json::Value;

/// A whole answer, whatever its status.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    /// # Panics
    /// There is no answer, or it breaks off.
    pub async fn to(request: RequestBuilder) -> Self {
        Self::whole(request.send().await.expect("the server answers")).await
    }

    /// # Panics
    /// The answer breaks off.
    pub async fn whole(response: Response) -> Self {
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let body = response.bytes().await.expect("an answer has an end");
        Self { status, headers, body }
    }

    /// Empty where there is none.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("headers are text"))
    }

    /// # Panics
    /// The body is something else.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// The code of a refusal, whose whole shape is checked: clients break on any other.
    ///
    /// # Panics
    /// The refusal is not as the contract has it.
    pub fn code(&self) -> String {
        let body = self.json();
        let text =
            |name: &str| body[name].as_str().unwrap_or_else(|| panic!("`{name}` in {self:?}"));
        assert!(self.header("content-type").starts_with("application/json"), "{self:?}");
        assert_eq!(text("error"), text("detail"));
        assert!(!text("error").is_empty());
        assert_eq!(text("request_id"), self.header("x-request-id"));
        text("code").to_owned()
    }

    /// Status and code of a refusal.
    pub fn refusal(&self) -> (u16, String) {
        (self.status, self.code())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// A value of a query, every byte escaped that could mean something.
pub fn escaped(value: impl AsRef<[u8]>) -> String {
    value.as_ref().iter().fold(String::new(), |text, byte| {
        if byte.is_ascii_alphanumeric() {
            text + char::from(*byte).encode_utf8(&mut [0])
        } else {
            text + &format!("%{byte:02X}")
        }
    })
}
