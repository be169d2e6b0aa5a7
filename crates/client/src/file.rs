//! Files of a sandbox, streamed both ways. Paths are absolute and may be any bytes but NUL.

use api::{DirListing, FileEntry, FileWritten, SandboxId};
use bytes::Bytes;
use http::header::{IF_RANGE, RANGE};
use reqwest::{Body, Method, Response};

use crate::{Client, Error, escaped, next_chunk};

/// How a file is written. The default keeps mode and owner of a file that it replaces, and makes parents.
#[derive(Debug, Clone, Default)]
pub struct WriteOptions {
    /// Permission bits.
    pub mode: Option<u32>,
    /// `user`, or `user:group`, by name or number.
    pub owner: Option<String>,
    /// When known, a lack of space is noticed before the first byte.
    pub size: Option<u64>,
}

impl Client {
    pub async fn read_file(
        &self,
        id: &SandboxId,
        path: impl AsRef<[u8]>,
    ) -> Result<FileContent, Error> {
        let response = self.send(self.request(Method::GET, &file_url(id, "", path))).await?;
        Ok(FileContent::new(response, self.url()))
    }

    /// The rest of a file from `start` on, or all of it where it is not what it was.
    pub async fn read_file_from(
        &self,
        id: &SandboxId,
        path: impl AsRef<[u8]>,
        start: u64,
        etag: &str,
    ) -> Result<FileContent, Error> {
        let request = self.request(Method::GET, &file_url(id, "", path));
        let request = request.header(RANGE, format!("bytes={start}-")).header(IF_RANGE, etag);
        Ok(FileContent::new(self.send(request).await?, self.url()))
    }

    /// The file appears whole or not at all.
    pub async fn write_file(
        &self,
        id: &SandboxId,
        path: impl AsRef<[u8]>,
        content: impl Into<Body>,
        options: &WriteOptions,
    ) -> Result<FileWritten, Error> {
        let mut url = file_url(id, "", path);
        if let Some(mode) = options.mode {
            url.push_str(&format!("&mode={mode:04o}"));
        }
        if let Some(owner) = &options.owner {
            url.push_str(&format!("&owner={}", escaped(owner)));
        }
        let mut request = self.request(Method::PUT, &url);
        if let Some(size) = options.size {
            request = request.header(http::header::CONTENT_LENGTH, size);
        }
        let response = self.send_upload(request.body(content)).await?;
        self.decode(response).await
    }

    /// Recursive; also fine when it is missing. A link is deleted, not what it points to.
    pub async fn delete_file(&self, id: &SandboxId, path: impl AsRef<[u8]>) -> Result<(), Error> {
        self.send(self.request(Method::DELETE, &file_url(id, "", path))).await.map(drop)
    }

    pub async fn stat_file(
        &self,
        id: &SandboxId,
        path: impl AsRef<[u8]>,
    ) -> Result<FileEntry, Error> {
        self.json(self.request(Method::GET, &file_url(id, "/stat", path))).await
    }

    pub async fn list_directory(
        &self,
        id: &SandboxId,
        path: impl AsRef<[u8]>,
    ) -> Result<DirListing, Error> {
        self.json(self.request(Method::GET, &file_url(id, "/dir", path))).await
    }
}

pub(crate) fn file_url(id: &SandboxId, route: &str, path: impl AsRef<[u8]>) -> String {
    format!("/v1/sandboxes/{id}/fs{route}?path={}", escaped(path))
}

/// A file on its way here.
pub struct FileContent {
    response: Response,
    url: String,
}

impl FileContent {
    pub(crate) fn new(response: Response, url: &str) -> Self {
        Self { response, url: url.to_owned() }
    }

    /// Not all of the file, but the part that was asked for.
    pub fn is_partial(&self) -> bool {
        self.response.status() == http::StatusCode::PARTIAL_CONTENT
    }

    pub fn size(&self) -> Option<u64> {
        self.response.content_length()
    }

    pub fn etag(&self) -> Option<&str> {
        self.response.headers().get(http::header::ETAG)?.to_str().ok()
    }

    /// `None` at the end of the file; an answer that was cut short is an error.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        next_chunk(&mut self.response, &self.url).await
    }

    /// The rest, held in memory: for files known to be small.
    pub async fn bytes(mut self) -> Result<Vec<u8>, Error> {
        let mut whole = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            whole.extend_from_slice(&chunk);
        }
        Ok(whole)
    }

    /// As the content of another file.
    pub fn into_body(self) -> Body {
        Body::wrap_stream(futures::stream::try_unfold(self, async |mut content| {
            Ok::<_, Error>(content.chunk().await?.map(|chunk| (chunk, content)))
        }))
    }
}
