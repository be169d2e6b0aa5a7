//! `atoll cp`: one file, between here and a sandbox or two sandboxes.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, Permissions},
    io,
    os::unix::{
        ffi::{OsStrExt as _, OsStringExt as _},
        fs::PermissionsExt as _,
    },
    path::{Path, PathBuf},
};

use anyhow::Context;
use api::{ErrorCode, FileKind, SandboxId};
use clap::{
    Args,
    builder::{OsStringValueParser, TypedValueParser as _},
};
use client::{Body, Client, FileContent, WriteOptions};

use crate::failure::Failure;

/// Copy one file into a sandbox, out of it, or between two
///
/// A side is a local path, `ID:/absolute/path` in a sandbox, or `-` for standard input or output. The file appears whole
/// or not at all, and keeps its permission bits. Directories cannot be copied yet: pack them with tar.
#[derive(Args)]
#[command(after_help = "\
Examples:
  atoll cp sales.csv $id:/home/panda/
  atoll cp $id:/home/panda/chart.png .
  tar -C project -czf - . | atoll cp - $id:/tmp/project.tgz")]
pub(crate) struct Copy {
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
    Local(tokio::fs::File),
    Standard,
    Sandbox(Box<FileContent>),
}

impl Copy {
    pub(crate) async fn run(self, client: &Client) -> anyhow::Result<()> {
        if !matches!(self.source, Side::Sandbox(..)) && !matches!(self.target, Side::Sandbox(..)) {
            return Err(Failure::new("neither side is in a sandbox")
                .hint("name one as ID:/path")
                .into());
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
                return Err(Failure::new(format!(
                    "{shown} is a directory, and only single files can be copied yet"
                ))
                .hint(format!("pack it: tar -C {shown} -czf - . | atoll cp - ID:/tmp/files.tgz"))
                .into());
            }
            Ok(Source {
                content: Content::Local(file),
                name: path.file_name().map(OsStr::to_owned),
                mode: metadata.is_file().then(|| metadata.permissions().mode() & 0o777),
                // A device or FIFO tells nothing about how much will come, nor do the files of /proc, of size 0.
                size: metadata.is_file().then_some(metadata.len()).filter(|&size| size > 0),
            })
        }
        Side::Sandbox(id, path) => {
            let entry = client.stat_file(&id, &path.0).await?;
            if entry.is_dir {
                return Err(Failure::new(format!(
                    "{} is a directory, and only single files can be copied yet",
                    entry.path
                ))
                .hint(format!(
                    "pack it: atoll sandbox exec {id} -- tar -C {} -czf /tmp/files.tgz .",
                    entry.path
                ))
                .into());
            }
            let content = client.read_file(&id, &path.0).await?;
            Ok(Source {
                size: content.size(),
                content: Content::Sandbox(Box::new(content)),
                name: path.file_name(),
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
    let options = WriteOptions { mode: source.mode, owner: None, size: source.size };
    let body: Body = match source.content {
        Content::Local(file) => client::body_of(file),
        Content::Standard => client::body_of(tokio::io::stdin()),
        Content::Sandbox(content) => content.into_body(),
    };
    client.write_file(id, &path.0, body, &options).await?;
    Ok(())
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
    while let Some(chunk) = content.chunk().await? {
        target.write_all(&chunk)?;
    }
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
