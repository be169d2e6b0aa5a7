//! `atoll cp -r`: directories, as tar archives that are packed and unpacked as they go.

use std::{
    fs,
    io::{self, Read as _, Write},
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
};

use anyhow::Context;
use client::{Body, FileContent};
use indicatif::ProgressBar;
use tar::EntryType;
use tokio::io::AsyncWriteExt as _;
use tokio_util::io::SyncIoBridge;

use super::progress;
use crate::failure::Failure;

/// Between the thread that packs or unpacks and the connection.
const BUFFER: usize = 256 << 10;

/// Beside directories.
const UNPACKED: [EntryType; 5] = [
    EntryType::Regular,
    EntryType::Link,
    EntryType::Symlink,
    EntryType::Continuous,
    EntryType::GNUSparse,
];
/// Of a comment in an archive.
const LONGEST_COMMENT: u64 = 16 << 10;

/// Packs a local directory while it is sent. The second tells whether the packing went well, after the body has ended.
pub(super) fn packed(directory: PathBuf) -> (Body, tokio::task::JoinHandle<anyhow::Result<()>>) {
    let (ours, theirs) = tokio::io::duplex(BUFFER);
    let packing = tokio::spawn(async move {
        let bar = progress::bar(None);
        let sink = bar.wrap_write(SyncIoBridge::new(ours));
        let packed = tokio::task::spawn_blocking(move || {
            let mut archive = tar::Builder::new(sink);
            archive.follow_symlinks(false);
            let packed = pack(&mut archive, &directory);
            let finished = archive.into_inner().context("send the archive");
            packed?;
            Ok::<_, anyhow::Error>(finished?.flush()?)
        });
        let packed = packed.await.context("pack")?;
        bar.finish_and_clear();
        packed
    });
    (client::body_of(theirs), packing)
}

fn pack(archive: &mut tar::Builder<impl Write>, root: &Path) -> anyhow::Result<()> {
    let mut ahead = vec![PathBuf::new()];
    while let Some(name) = ahead.pop() {
        let path = if name.as_os_str().is_empty() { root.to_owned() } else { root.join(&name) };
        let context = || format!("read {}", path.display());
        let stat =
            if name.as_os_str().is_empty() { path.metadata() } else { path.symlink_metadata() };
        let kind = stat.with_context(context)?.file_type();
        if kind.is_dir() {
            let inside = if name.as_os_str().is_empty() { Path::new(".") } else { &name };
            archive.append_dir(inside, &path).with_context(context)?;
            for entry in fs::read_dir(&path).with_context(context)? {
                ahead.push(name.join(entry.with_context(context)?.file_name()));
            }
        } else if kind.is_fifo()
            || kind.is_socket()
            || kind.is_char_device()
            || kind.is_block_device()
        {
            warn(&format!("left out {}: it is a device, a FIFO or a socket", path.display()));
        } else {
            archive.append_path_with_name(&path, &name).with_context(context)?;
        }
    }
    Ok(())
}

/// Unpacks into a local directory as the archive comes. Nothing of it gets out of the directory.
pub(super) async fn unpacked(content: FileContent, directory: PathBuf) -> anyhow::Result<()> {
    let (mut ours, theirs) = tokio::io::duplex(BUFFER);
    let unpacking =
        tokio::task::spawn_blocking(move || unpack(SyncIoBridge::new(theirs), &directory));
    let bar = progress::bar(None);
    let sent = send(content, &mut ours, &bar).await;
    drop(ours);
    let unpacked = unpacking.await.context("unpack")?;
    bar.finish_and_clear();
    // Where the archive broke off, that is why it cannot be unpacked.
    sent?;
    unpacked
}

async fn send(
    mut content: FileContent,
    sink: &mut (impl tokio::io::AsyncWrite + Unpin),
    bar: &ProgressBar,
) -> Result<(), client::Error> {
    while let Some(chunk) = content.chunk().await? {
        bar.inc(chunk.len() as u64);
        if sink.write_all(&chunk).await.is_err() {
            // The other side has failed, and says why.
            break;
        }
    }
    Ok(())
}

fn unpack(reader: impl io::Read, directory: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;
    let mut archive = tar::Archive::new(reader);
    archive.set_preserve_permissions(true);
    archive.set_preserve_mtime(true);
    archive.set_overwrite(true);
    // Their times and modes come when nothing more is put into them.
    let mut directories = Vec::new();
    for entry in archive.entries().context("read the archive")? {
        let mut entry = entry.context("read the archive")?;
        let kind = entry.header().entry_type();
        let name = entry.path().context("read the archive")?.into_owned();
        if kind == EntryType::XGlobalHeader {
            let mut text = String::new();
            // What is no text is no comment of ours.
            let _ = entry.take(LONGEST_COMMENT).read_to_string(&mut text);
            if let Some((_, comment)) = text.trim_end().split_once("comment=") {
                warn(comment);
            }
        } else if kind.is_dir() {
            directories.push(entry);
        } else if UNPACKED.contains(&kind) {
            unpack_entry(&mut entry, directory, &name)?;
        } else {
            warn(&format!("left out {}: it is no file, directory or link", name.display()));
        }
    }
    // The deepest first: what is above may not let them be changed.
    directories.sort_by(|one, other| other.path_bytes().cmp(&one.path_bytes()));
    for mut entry in directories {
        let name = entry.path().context("read the archive")?.into_owned();
        unpack_entry(&mut entry, directory, &name)?;
    }
    Ok(())
}

fn unpack_entry(
    entry: &mut tar::Entry<'_, impl io::Read>,
    directory: &Path,
    name: &Path,
) -> anyhow::Result<()> {
    let context = || format!("write {}", directory.join(name).display());
    if !entry.unpack_in(directory).with_context(context)? {
        let name = name.display();
        return Err(
            Failure::new(format!("{name} would be written outside of the directory")).into()
        );
    }
    Ok(())
}

#[expect(clippy::print_stderr, reason = "beside what is asked for")]
fn warn(text: &str) {
    eprintln!("warning: {text}");
}
