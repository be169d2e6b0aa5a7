//! Large files in parts: each is sent again when it did not come through, and a copy that was broken off goes on where it
//! was when it is begun again.

use std::{io::SeekFrom, time::Duration};

use anyhow::Context;
use api::{BeginUpload, CompleteUpload, ErrorCode, SandboxId, Upload};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use client::Client;
use indicatif::ProgressBar;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncSeekExt};

use super::progress;

/// What is no larger goes in one request.
pub(super) const LARGEST_WHOLE: u64 = 32 << 20;
const TRIES: u32 = 6;
const PAUSE: Duration = Duration::from_secs(1);

/// Where it goes, and as what.
pub(super) struct Target<'a> {
    pub(super) client: &'a Client,
    pub(super) id: &'a SandboxId,
    pub(super) path: &'a [u8],
    pub(super) mode: Option<u32>,
}

impl Target<'_> {
    fn request(&self, size: Option<u64>) -> BeginUpload {
        let text = std::str::from_utf8(self.path).ok().map(str::to_owned);
        BeginUpload {
            path_b64: text.is_none().then(|| BASE64_STANDARD.encode(self.path)),
            path: text,
            size,
            mode: self.mode.map(|mode| format!("{mode:04o}")),
            ..BeginUpload::default()
        }
    }

    /// A local file. `identity` tells this content of it from any other: with it an upload is found that was broken off.
    pub(super) async fn file(
        &self,
        file: &mut tokio::fs::File,
        size: u64,
        identity: &str,
    ) -> anyhow::Result<()> {
        let request = self.request(Some(size));
        let digest = Sha256::new().chain_update(self.id.to_string()).chain_update([0]);
        let digest = digest.chain_update(self.path).chain_update([0]).chain_update(identity);
        let key = hexadecimal(&digest.finalize());
        let upload = match self.again(&request, &key).await? {
            Some(upload) => upload,
            // The one of that key was completed, or given up.
            None => self.client.begin_upload(self.id, &request, None).await?,
        };
        let bar = progress::bar(Some(size));
        for number in 1..=count(size, upload.part_size)? {
            let start = u64::from(number - 1) * upload.part_size;
            let length = (size - start).min(upload.part_size);
            if upload.parts.iter().any(|run| (run.first..=run.last).contains(&number)) {
                bar.inc(length);
                continue;
            }
            file.seek(SeekFrom::Start(start)).await.context("read the file")?;
            let mut part = vec![0; usize::try_from(length)?];
            file.read_exact(&mut part).await.context("read the file, which became shorter")?;
            self.send(&upload, number, part, &bar).await?;
        }
        self.complete(&upload, &bar).await
    }

    async fn again(&self, request: &BeginUpload, key: &str) -> anyhow::Result<Option<Upload>> {
        let begun = self.client.begin_upload(self.id, request, Some(key)).await?;
        match self.client.upload(self.id, &begun.id).await {
            Ok(upload) => Ok(Some(upload)),
            Err(error) if error.code() == Some(ErrorCode::NotFound) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// What has no size before its end.
    pub(super) async fn stream(
        &self,
        reader: &mut (impl AsyncRead + Unpin),
        size: Option<u64>,
        start: Vec<u8>,
    ) -> anyhow::Result<()> {
        let upload = self.client.begin_upload(self.id, &self.request(size), None).await?;
        let bar = progress::bar(size);
        let sent = self.send_all(&upload, reader, start, &bar).await;
        if sent.is_err() {
            // It cannot be read again; whatever is wrong with this matters less.
            let _ = self.client.abort_upload(self.id, &upload.id).await;
        }
        sent
    }

    async fn send_all(
        &self,
        upload: &Upload,
        reader: &mut (impl AsyncRead + Unpin),
        start: Vec<u8>,
        bar: &ProgressBar,
    ) -> anyhow::Result<()> {
        let (mut number, mut part) = (1, start);
        let length = usize::try_from(upload.part_size)?;
        loop {
            let left = (length - part.len().min(length)) as u64;
            (&mut *reader).take(left).read_to_end(&mut part).await.context("read the content")?;
            let rest = part.split_off(part.len().min(length));
            let is_last = part.len() < length && rest.is_empty();
            if !part.is_empty() || number == 1 {
                self.send(upload, number, std::mem::replace(&mut part, rest), bar).await?;
            }
            if is_last {
                return self.complete(upload, bar).await;
            }
            number += 1;
        }
    }

    async fn send(
        &self,
        upload: &Upload,
        number: u32,
        part: Vec<u8>,
        bar: &ProgressBar,
    ) -> anyhow::Result<()> {
        let digest = hexadecimal(&Sha256::digest(&part));
        let (length, part) = (part.len() as u64, bytes::Bytes::from(part));
        let mut pause = PAUSE;
        for attempt in 1.. {
            let sent = self.client.write_part(self.id, &upload.id, number, part.clone(), &digest);
            match sent.await {
                Ok(()) => break,
                Err(error) if attempt < TRIES && may_pass(&error) => {
                    bar.suspend(|| ());
                    tokio::time::sleep(error.may_retry_after().unwrap_or(pause)).await;
                    pause *= 2;
                }
                Err(error) => return Err(error.into()),
            }
        }
        bar.inc(length);
        Ok(())
    }

    async fn complete(&self, upload: &Upload, bar: &ProgressBar) -> anyhow::Result<()> {
        self.client.complete_upload(self.id, &upload.id, &CompleteUpload::default()).await?;
        bar.finish_and_clear();
        Ok(())
    }
}

/// A part may be sent any number of times, so it is after whatever is not plainly a refusal.
fn may_pass(error: &client::Error) -> bool {
    error.status().is_none_or(|status| status >= 500 && status != 507 || status == 429)
}

fn count(size: u64, part_size: u64) -> anyhow::Result<u32> {
    Ok(u32::try_from(size.div_ceil(part_size.max(1)))?)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
