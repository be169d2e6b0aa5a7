//! `atoll cp`: files and directories, between here and a sandbox or two sandboxes.

mod parts;
mod progress;
mod tree;

use std::{
    ffi::{OsStr, OsString},
    fs::{self, Metadata, Permissions},
    io,
    os::unix::{
        ffi::{OsStrExt as _, OsStringExt as _},
        fs::{MetadataExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context;
use api::{ErrorCode, FileKind, SandboxId};
use bytes::Bytes;
use clap::{
    Args,
    builder::{OsStringValueParser, TypedValueParser as _},
};
use client::{Client, FileContent, WriteOptions};
use futures::Stream;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio_util::io::StreamReader;

use self::parts::LARGEST_WHOLE;
use crate::failure::Failure;

/// After a connection that was lost in the middle of a file.
const TRIES: u32 = 10;
const PAUSE: Duration = Duration::from_secs(1);

/// Copy files and directories into a sandbox, out of it, or between two
///
/// A side is a local path, `ID:/absolute/path` in a sandbox, or `-` for standard input or output. A file appears whole
/// or not at all, and keeps its permission bits. One of more than 32 MiB goes in parts: the same command, given again after
/// it was broken off, goes on where it was. With `-r` a directory is copied with all that is in it: into a directory that
/// exists, else under the name that is given. Modes, times and links are kept; in a sandbox all of it is root's.
#[derive(Args)]
#[command(after_help = "\
Examples:
  atoll cp sales.csv $id:/home/panda/
  atoll cp $id:/home/panda/chart.png .
  atoll cp -r project $id:/work/
  atoll cp -r $id:/work/project/results .")]
pub(crate) struct Copy {
    /// Copy a directory with all that is in it
    #[arg(short, long)]
    recursive: bool,
    /// A local file, ID:/path, or - for standard input
    #[arg(value_name = "SOURCE", value_parser = OsStringValueParser::new().try_map(Side::parse))]
    source: Side,
    /// A local file or directory, ID:/path, or - for standard output
    #[arg(value_name = "TARGET", value_parser = OsStringValueParser::new().try_map(Side::parse))]
    target: Side,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Side {
    Local(PathBuf),
    Standard,
    Sandbox(SandboxId, RemotePath),
}

/// Bytes: names in a guest need not be UTF-8.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RemotePath(Vec<u8>);

impl Side {
    /// A colon makes it a place in a sandbox, unless a slash comes before it.
    #[expect(clippy::needless_pass_by_value, reason = "clap hands values over")]
    fn parse(text: OsString) -> Result<Self, String> {
        let bytes = text.as_bytes();
        let colon = bytes
            .iter()
            .position(|&byte| byte == b':')
            .filter(|&colon| !bytes[..colon].contains(&b'/'));
        let Some(colon) = colon else {
            return Ok(if bytes == b"-" {
                Self::Standard
            } else {
                Self::Local(PathBuf::from(&text))
            });
        };
        let (id, path) = (String::from_utf8_lossy(&bytes[..colon]), &bytes[colon + 1..]);
        let id = id.parse().map_err(|_| {
            format!("`{id}` is not the id of a sandbox; write ./{id}:… for a local file")
        })?;
        if path.first() != Some(&b'/') {
            return Err("a path in a sandbox is absolute: ID:/path".to_owned());
        }
        Ok(Self::Sandbox(id, RemotePath(path.to_vec())))
    }
}

impl RemotePath {
    fn join(mut self, name: &OsStr) -> Self {
        if self.0.last() != Some(&b'/') {
            self.0.push(b'/');
        }
        self.0.extend_from_slice(name.as_bytes());
        self
    }

    fn without_slashes(mut self) -> Self {
        while self.0.len() > 1 && self.0.last() == Some(&b'/') {
            self.0.pop();
        }
        self
    }

    fn file_name(&self) -> Option<OsString> {
        self.0
            .rsplit(|&byte| byte == b'/')
            .next()
            .filter(|name| !name.is_empty())
            .map(|name| OsString::from_vec(name.to_vec()))
    }
}

/// A file that was opened.
struct Source {
    content: Content,
    /// `None` for standard input.
    name: Option<OsString>,
    mode: Option<u32>,
    size: Option<u64>,
}

enum Content {
    /// With what tells this content from any other, where it is a file.
    Local(tokio::fs::File, Option<String>),
    Standard,
    Sandbox(Box<Download>),
}

impl Copy {
    pub(crate) async fn run(self, client: &Client) -> anyhow::Result<()> {
        if !matches!(self.source, Side::Sandbox(..)) && !matches!(self.target, Side::Sandbox(..)) {
            return Err(Failure::new("neither side is in a sandbox")
                .hint("name one as ID:/path")
                .into());
        }
        if self.recursive {
            return copy_tree(client, self.source, self.target).await;
        }
        let source = open(client, self.source).await?;
        match self.target {
            Side::Sandbox(id, path) => upload(client, source, &id, path).await,
            Side::Local(path) => download(source, &path).await,
            Side::Standard => pour(source, &mut io::stdout().lock()).await,
        }
    }
}

async fn open(client: &Client, side: Side) -> anyhow::Result<Source> {
    match side {
        Side::Standard => {
            Ok(Source { content: Content::Standard, name: None, mode: None, size: None })
        }
        Side::Local(path) => {
            let file = tokio::fs::File::open(&path)
                .await
                .with_context(|| format!("read {}", path.display()))?;
            let metadata =
                file.metadata().await.with_context(|| format!("read {}", path.display()))?;
            if metadata.is_dir() {
                let shown = path.display();
                return Err(Failure::new(format!("{shown} is a directory"))
                    .hint("copy it with -r")
                    .into());
            }
            Ok(Source {
                content: Content::Local(
                    file,
                    metadata.is_file().then(|| identity(&path, &metadata)),
                ),
                name: path.file_name().map(OsStr::to_owned),
                mode: metadata.is_file().then(|| metadata.permissions().mode() & 0o777),
                // A device or FIFO tells nothing about how much will come, nor do the files of /proc, of size 0.
                size: metadata.is_file().then_some(metadata.len()).filter(|&size| size > 0),
            })
        }
        Side::Sandbox(id, path) => {
            let entry = client.stat_file(&id, &path.0).await?;
            if entry.is_dir {
                return Err(Failure::new(format!("{} is a directory", entry.path))
                    .hint("copy it with -r")
                    .into());
            }
            let name = path.file_name();
            let content = client.read_file(&id, &path.0).await?;
            Ok(Source {
                size: content.size(),
                content: Content::Sandbox(Box::new(Download::new(client, id, path, content))),
                name,
                // A link's own bits mean nothing.
                mode: u32::from_str_radix(&entry.mode, 8)
                    .ok()
                    .filter(|_| entry.kind == FileKind::File),
            })
        }
    }
}

async fn upload(
    client: &Client,
    source: Source,
    id: &SandboxId,
    path: RemotePath,
) -> anyhow::Result<()> {
    let path = match &source.name {
        Some(name) if is_directory(client, id, &path).await? => path.join(name),
        Some(_) | None => path,
    };
    let target = parts::Target { client, id, path: &path.0, mode: source.mode };
    match (source.content, source.size) {
        (Content::Local(mut file, Some(identity)), Some(size)) if size > LARGEST_WHOLE => {
            target.file(&mut file, size, &identity).await
        }
        (Content::Local(mut file, _), size) => whole_or_parts(&target, &mut file, size).await,
        (Content::Standard, size) => whole_or_parts(&target, &mut tokio::io::stdin(), size).await,
        (Content::Sandbox(content), size) => {
            let bytes = Box::pin(content.into_stream());
            whole_or_parts(&target, &mut StreamReader::new(bytes), size).await
        }
    }
}

/// In one request, unless it turns out to be longer than one may be.
async fn whole_or_parts(
    target: &parts::Target<'_>,
    reader: &mut (impl AsyncRead + Unpin),
    size: Option<u64>,
) -> anyhow::Result<()> {
    let mut start = Vec::new();
    (&mut *reader)
        .take(LARGEST_WHOLE + 1)
        .read_to_end(&mut start)
        .await
        .context("read the content")?;
    if start.len() as u64 > LARGEST_WHOLE {
        return target.stream(reader, size.filter(|&size| size > LARGEST_WHOLE), start).await;
    }
    let options = WriteOptions { mode: target.mode, owner: None, size: Some(start.len() as u64) };
    target.client.write_file(target.id, target.path, start, &options).await?;
    Ok(())
}

/// By which this content is known again: another file, or a change, has another.
fn identity(path: &Path, metadata: &Metadata) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let (size, inode) = (metadata.len(), metadata.ino());
    let (seconds, nanoseconds) = (metadata.mtime(), metadata.mtime_nsec());
    format!("{} {size} {inode} {seconds}.{nanoseconds}", path.display())
}

/// As `cp -r` does: into a directory that exists, else under the name that is given.
async fn copy_tree(client: &Client, source: Side, target: Side) -> anyhow::Result<()> {
    let name = match &source {
        Side::Local(path) => {
            if !path.is_dir() {
                return Err(Failure::new(format!("{} is not a directory", path.display()))
                    .hint("leave -r out")
                    .into());
            }
            // `.` and `..` have no name of their own: what is in them is copied.
            let text = path.as_os_str().as_bytes();
            let is_here = text == b"." || text.ends_with(b"/.");
            path.file_name().filter(|_| !is_here).map(OsStr::to_owned)
        }
        Side::Sandbox(id, path) => {
            // Through a link as well, for it is listed so.
            client.list_directory(id, &path.0).await?;
            path.clone().without_slashes().file_name()
        }
        Side::Standard => {
            return Err(Failure::new("a directory cannot come from standard input").into());
        }
    };
    match target {
        Side::Sandbox(id, path) => {
            let path = match name {
                Some(name) if is_directory(client, &id, &path).await? => path.join(&name),
                Some(_) | None => path,
            };
            match source {
                Side::Local(directory) => {
                    let (body, packing) = tree::packed(directory);
                    let sent = client.unpack(&id, &path.0, body, Some("root:root")).await;
                    let packed = packing.await.context("pack")?;
                    match sent {
                        Err(refused @ client::Error::Refused(_)) => return Err(refused.into()),
                        // Where it could not be packed, that is why it could not be sent.
                        sent => packed.and(sent.map(drop).map_err(Into::into))?,
                    }
                }
                Side::Sandbox(from, directory) => {
                    let archive = client.pack(&from, &directory.0, "tar").await?;
                    client.unpack(&id, &path.0, archive.into_body(), None).await?;
                }
                Side::Standard => {}
            }
            Ok(())
        }
        Side::Local(path) => {
            let Side::Sandbox(id, directory) = source else { return Ok(()) };
            let path = match name {
                Some(name) if path.is_dir() => path.join(name),
                Some(_) | None => path,
            };
            tree::unpacked(client.pack(&id, &directory.0, "tar").await?, path).await
        }
        Side::Standard => Err(Failure::new("a directory cannot go to standard output").into()),
    }
}

/// A file on its way out of a sandbox. Where the connection is lost, it goes on from where it was.
struct Download {
    client: Client,
    id: SandboxId,
    path: RemotePath,
    content: FileContent,
    received: u64,
    tries: u32,
}

impl Download {
    fn new(client: &Client, id: SandboxId, path: RemotePath, content: FileContent) -> Self {
        Self { client: client.clone(), id, path, content, received: 0, tries: TRIES }
    }

    async fn chunk(&mut self) -> Result<Option<Bytes>, client::Error> {
        loop {
            let error = match self.content.chunk().await {
                Ok(chunk) => {
                    self.received += chunk.as_ref().map_or(0, |chunk| chunk.len() as u64);
                    return Ok(chunk);
                }
                Err(error) => error,
            };
            let Some(etag) = self.content.etag().map(str::to_owned) else { return Err(error) };
            if self.tries == 0 {
                return Err(error);
            }
            self.tries -= 1;
            tokio::time::sleep(PAUSE).await;
            let rest =
                self.client.read_file_from(&self.id, &self.path.0, self.received, &etag).await;
            match rest {
                Ok(content) if content.is_partial() => self.content = content,
                // It has changed meanwhile, or is gone.
                Ok(_) | Err(client::Error::Refused(_)) => return Err(error),
                Err(_) => {}
            }
        }
    }

    fn into_stream(self) -> impl Stream<Item = io::Result<Bytes>> {
        futures::stream::try_unfold(self, async |mut download| {
            let chunk = download.chunk().await.map_err(io::Error::other)?;
            Ok(chunk.map(|chunk| (chunk, download)))
        })
    }
}

async fn is_directory(
    client: &Client,
    id: &SandboxId,
    path: &RemotePath,
) -> Result<bool, client::Error> {
    if path.0.ends_with(b"/") {
        return Ok(true);
    }
    match client.stat_file(id, &path.0).await {
        Ok(entry) => Ok(entry.is_dir),
        Err(error) if error.code() == Some(ErrorCode::NotFound) => Ok(false),
        Err(error) => Err(error),
    }
}

async fn download(source: Source, path: &Path) -> anyhow::Result<()> {
    let path = match &source.name {
        Some(name) if path.is_dir() => path.join(name),
        Some(_) | None => path.to_owned(),
    };
    let context = || format!("write {}", path.display());
    if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
        // A device or FIFO cannot be replaced by a file.
        let mut file = fs::OpenOptions::new().write(true).open(&path).with_context(context)?;
        return pour(source, &mut file).await;
    }
    // What a link points to is replaced, not the link.
    let path = path.canonicalize().unwrap_or_else(|_| path.clone());
    let directory =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(directory).with_context(context)?;
    let mode = source.mode.unwrap_or(0o644) & 0o777;
    pour(source, &mut file).await?;
    file.as_file().set_permissions(Permissions::from_mode(mode)).with_context(context)?;
    file.persist(&path).map_err(|error| error.error).with_context(context)?;
    Ok(())
}

async fn pour(source: Source, target: &mut impl io::Write) -> anyhow::Result<()> {
    let Content::Sandbox(mut content) = source.content else {
        return Err(Failure::new("neither side is in a sandbox").into());
    };
    let bar = progress::bar(source.size);
    while let Some(chunk) = content.chunk().await? {
        target.write_all(&chunk)?;
        bar.inc(chunk.len() as u64);
    }
    bar.finish_and_clear();
    Ok(target.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(text: &str) -> Result<Side, String> {
        Side::parse(text.into())
    }

    #[test]
    fn a_side_is_a_sandbox_only_when_it_names_one() {
        let id = SandboxId::random();
        assert_eq!(
            side(&format!("{id}:/a b")),
            Ok(Side::Sandbox(id, RemotePath(b"/a b".to_vec())))
        );
        assert_eq!(side("-"), Ok(Side::Standard));
        for local in ["a", "./a:b", "/tmp/x:/y", "-a"] {
            assert_eq!(side(local), Ok(Side::Local(local.into())));
        }
        for unclear in ["a:b", "a:/b", ":", &format!("{id}:relative"), &format!("{id}:")] {
            assert!(side(unclear).is_err(), "{unclear}");
        }
    }

    #[test]
    fn a_name_that_is_not_utf8_is_kept() {
        let id = SandboxId::random();
        let mut text = format!("{id}:/").into_bytes();
        text.push(0xff);
        assert_eq!(
            Side::parse(OsString::from_vec(text)),
            Ok(Side::Sandbox(id, RemotePath(vec![b'/', 0xff])))
        );
    }

    #[test]
    fn a_file_put_into_a_directory_keeps_its_name() {
        for directory in ["/a", "/a/"] {
            assert_eq!(
                RemotePath(directory.into()).join(OsStr::new("b")),
                RemotePath(b"/a/b".to_vec())
            );
        }
        assert_eq!(RemotePath(b"/a/b".to_vec()).file_name(), Some("b".into()));
    }
}
