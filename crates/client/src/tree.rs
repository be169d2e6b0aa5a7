//! Whole directories as tar archives, files of any size in parts, and changes of files in place.

use api::{
    BeginUpload, ChangeFile, CompleteUpload, FileEntry, FileWritten, MakeDirectory, MoveFile,
    SandboxId, Unpacked, Upload,
};
use bytes::Bytes;
use reqwest::{Body, Method};

use crate::{Client, Error, FileContent, escaped, file::file_url};

impl Client {
    /// `archive` is tar, plain or compressed with gzip or Zstandard. What came before a failure stays.
    pub async fn unpack(
        &self,
        id: &SandboxId,
        directory: impl AsRef<[u8]>,
        archive: impl Into<Body>,
        owner: Option<&str>,
    ) -> Result<Unpacked, Error> {
        let mut url = file_url(id, "/archive", directory);
        if let Some(owner) = owner {
            url.push_str(&format!("&owner={}", escaped(owner)));
        }
        let response = self.send_upload(self.request(Method::PUT, &url).body(archive)).await?;
        self.decode(response).await
    }

    /// A directory with all that is in it, or one file. `format` is `tar`, `tar.gz` or `tar.zst`.
    pub async fn pack(
        &self,
        id: &SandboxId,
        path: impl AsRef<[u8]>,
        format: &str,
    ) -> Result<FileContent, Error> {
        let url = format!("{}&format={format}", file_url(id, "/archive", path));
        let response = self.send(self.request(Method::GET, &url)).await?;
        Ok(FileContent::new(response, self.url()))
    }

    /// The same `key` gives the same upload for a day, with whatever parts of it are there.
    pub async fn begin_upload(
        &self,
        id: &SandboxId,
        request: &BeginUpload,
        key: Option<&str>,
    ) -> Result<Upload, Error> {
        let mut post =
            self.request(Method::POST, &format!("/v1/sandboxes/{id}/fs/uploads")).json(request);
        if let Some(key) = key {
            post = post.header("idempotency-key", key);
        }
        self.json(post).await
    }

    pub async fn upload(&self, id: &SandboxId, upload: &str) -> Result<Upload, Error> {
        self.json(self.request(Method::GET, &upload_url(id, upload, ""))).await
    }

    /// `sha256` is that of the part, in hexadecimal.
    pub async fn write_part(
        &self,
        id: &SandboxId,
        upload: &str,
        number: u32,
        part: Bytes,
        sha256: &str,
    ) -> Result<(), Error> {
        let url = upload_url(id, upload, &format!("/parts/{number}"));
        let request = self.request(Method::PUT, &url).header("x-checksum-sha256", sha256);
        self.send_upload(request.body(part)).await.map(drop)
    }

    pub async fn complete_upload(
        &self,
        id: &SandboxId,
        upload: &str,
        request: &CompleteUpload,
    ) -> Result<FileWritten, Error> {
        let url = upload_url(id, upload, "/complete");
        // The guest may have a lot to flush, or to read.
        let response = self.send_upload(self.request(Method::POST, &url).json(request)).await?;
        self.decode(response).await
    }

    pub async fn abort_upload(&self, id: &SandboxId, upload: &str) -> Result<(), Error> {
        self.send(self.request(Method::DELETE, &upload_url(id, upload, ""))).await.map(drop)
    }

    pub async fn move_file(&self, id: &SandboxId, request: &MoveFile) -> Result<FileEntry, Error> {
        let url = format!("/v1/sandboxes/{id}/fs/move");
        self.json(self.request(Method::POST, &url).json(request)).await
    }

    pub async fn make_directory(
        &self,
        id: &SandboxId,
        request: &MakeDirectory,
    ) -> Result<FileEntry, Error> {
        let url = format!("/v1/sandboxes/{id}/fs/mkdir");
        self.json(self.request(Method::POST, &url).json(request)).await
    }

    pub async fn change_file(
        &self,
        id: &SandboxId,
        path: impl AsRef<[u8]>,
        request: &ChangeFile,
    ) -> Result<FileEntry, Error> {
        self.json(self.request(Method::PATCH, &file_url(id, "", path)).json(request)).await
    }
}

fn upload_url(id: &SandboxId, upload: &str, route: &str) -> String {
    format!("/v1/sandboxes/{id}/fs/uploads/{}{route}", escaped(upload))
}
