//! Where backups lie: a folder, or an S3-compatible object storage. Everything is compressed with Zstandard on the way, but
//! the manifests. What is put is whole or not there, and is looked at again before anybody counts on it.

use std::{
    fs::{self, DirBuilder, File},
    io,
    ops::Range,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use api::ErrorCode;
use async_compression::tokio::{bufread::ZstdDecoder, write::ZstdEncoder};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::{
    ObjectStore, ObjectStoreExt, buffered::BufWriter, local::LocalFileSystem, path::Path as Key,
};
use tokio::{
    io::{AsyncRead, AsyncWriteExt},
    runtime::Handle,
    sync::watch,
    time::timeout,
};
use tokio_util::io::StreamReader;
use url::Url;

use crate::{Error, database::settings::BackupPlace};

/// In the data directory.
const FOLDER: &str = "database-backups";
/// For one piece of an upload, the crate's own repetitions included; and for a request without content.
const PIECE_DEADLINE: Duration = Duration::from_secs(300);
/// Of what is uploaded in parts, which are all of the same size: not every storage takes others.
const UPLOAD_PIECE: std::ops::RangeInclusive<u64> = 8 * MIB..=64 * MIB;
/// S3 takes 10 000.
const MOST_PIECES: u64 = 9_000;
/// On their way at once, of one upload.
const UPLOADED_AT_ONCE: u64 = 32 * MIB;
const UPLOADS_AT_ONCE: u64 = 2;
/// For what is under way to end, each within its own deadline.
const SETTLED_DEADLINE: Duration = Duration::from_secs(660);
/// Of one request: the crate gives each half a minute, with all that it answers.
const DOWNLOAD_PIECE: u64 = 8 << 20;
const DOWNLOADS_AT_ONCE: usize = 2;
/// Of the environment, what is meant for the storage.
const VARIABLES: &str = "AWS_";
const MIB: u64 = 1 << 20;
/// Above a server's databases, in a storage that may hold other things.
const ABOVE: &str = "databases";

#[derive(Clone)]
pub(super) struct BackupStore {
    store: Arc<dyn ObjectStore>,
    prefix: Key,
    /// Where it is one: its files are flushed.
    folder: Option<PathBuf>,
    /// What is just being put there.
    under_way: Arc<watch::Sender<Vec<Key>>>,
}

/// Told of until it is dropped.
struct UnderWay {
    key: Key,
    all: Arc<watch::Sender<Vec<Key>>>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.all.send_modify(|keys| {
            if let Some(at) = keys.iter().position(|key| *key == self.key) {
                keys.swap_remove(at);
            }
        });
    }
}

/// A piece of content on its way in. What is dropped before its end is not in the store, nor are parts of it.
pub(super) struct Upload {
    /// `None` once it ends.
    encoder: Option<(ZstdEncoder<BufWriter>, UnderWay)>,
    store: BackupStore,
    key: Key,
}

impl BackupStore {
    /// `None`: there shall be no backups.
    ///
    /// # Errors
    /// It is no place for them. Whether it can be reached is found out when it is used.
    pub(super) fn open(place: &BackupPlace, data: &Path) -> Result<Option<Self>, Error> {
        match place {
            BackupPlace::Nowhere => Ok(None),
            BackupPlace::Data => Self::folder(&data.join(FOLDER)).map(Some),
            BackupPlace::Folder(path) => Self::folder(path).map(Some),
            BackupPlace::Url(url) => Self::of_url(url).map(Some),
        }
    }

    fn folder(path: &Path) -> Result<Self, Error> {
        let opened = || -> Result<_, Box<dyn std::error::Error + Send + Sync>> {
            DirBuilder::new().recursive(true).mode(0o700).create(path)?;
            let path = path.canonicalize()?;
            let store = LocalFileSystem::new_with_prefix(&path)?.with_automatic_cleanup(true);
            Ok((store, path))
        };
        let (store, path) = opened().map_err(Error::from_start)?;
        Ok(Self::new(Arc::new(store), Key::default(), Some(path)))
    }

    /// Keys, region and endpoint come from the environment, as the storage's own tools have them: `AWS_ACCESS_KEY_ID` and
    /// so on.
    fn of_url(url: &str) -> Result<Self, Error> {
        let url = Url::parse(url).map_err(Error::from_start)?;
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok().filter(|name| name.starts_with(VARIABLES))?;
            Some((name, value.into_string().ok()?))
        });
        let (store, prefix) =
            object_store::parse_url_opts(&url, variables).map_err(Error::from_start)?;
        Ok(Self::new(store.into(), prefix.join(ABOVE), None))
    }

    fn new(store: Arc<dyn ObjectStore>, prefix: Key, folder: Option<PathBuf>) -> Self {
        Self { store, prefix, folder, under_way: Arc::new(watch::Sender::new(Vec::new())) }
    }

    /// Whether it takes room of that directory's file system.
    pub(super) fn is_beside(&self, directory: &Path) -> Result<bool, Error> {
        let Some(folder) = &self.folder else { return Ok(false) };
        store::pool::is_same_file_system(folder, directory).map_err(Error::from_start)
    }

    fn key(&self, name: &str) -> Key {
        name.split('/').fold(self.prefix.clone(), |key, part| key.join(part))
    }

    /// Of no more than so many bytes.
    pub(super) fn upload(&self, name: &str, most: u64) -> Upload {
        let key = self.key(name);
        let (piece, at_once) = pieces_of(most);
        let writer = BufWriter::with_capacity(Arc::clone(&self.store), key.clone(), piece)
            .with_max_concurrency(at_once);
        let under_way = self.begin(&key);
        let encoder = Some((ZstdEncoder::new(writer), under_way));
        Upload { encoder, store: self.clone(), key }
    }

    fn begin(&self, key: &Key) -> UnderWay {
        let under_way = UnderWay { key: key.clone(), all: Arc::clone(&self.under_way) };
        self.under_way.send_modify(|keys| keys.push(key.clone()));
        under_way
    }

    /// Waits until nothing below a name is on its way any longer: what is listed then is all that there is.
    ///
    /// # Errors
    /// Something still is.
    pub(super) async fn settled(&self, below: &str) -> Result<(), Error> {
        let (above, mut under_way) = (self.key(below), self.under_way.subscribe());
        let settled = under_way.wait_for(|keys| !keys.iter().any(|key| key.prefix_matches(&above)));
        // The other end lives as long as we do.
        timeout(SETTLED_DEADLINE, settled).await.map(drop).map_err(|_| silent())
    }

    /// As it is: small, and read by people.
    pub(super) async fn put(&self, name: &str, content: Bytes) -> Result<(), Error> {
        let (key, bytes) = (self.key(name), content.len() as u64);
        let (store, at, under_way) = (Arc::clone(&self.store), key.clone(), self.begin(&key));
        // It comes to its end also where nobody waits for that any longer: it may be there all the same.
        let putting = tokio::spawn(async move {
            let put = store.put(&at, content.into()).await;
            drop(under_way);
            put
        });
        let put = timeout(PIECE_DEADLINE, putting).await.map_err(|_| silent())?;
        put.map_err(Error::internal)?.map_err(failed)?;
        self.check(&key, bytes).await
    }

    /// It is there, as long as it was, and on the disk.
    async fn check(&self, key: &Key, bytes: u64) -> Result<(), Error> {
        let found = bounded(self.store.head(key)).await?.size;
        if found != bytes {
            return Err(Error::internal(format!(
                "{key} has {found} bytes of {bytes} in the store"
            )));
        }
        if let Some(folder) = &self.folder {
            let path = folder.join(key.as_ref());
            on_disk(move || flush(&path)).await?;
        }
        Ok(())
    }

    /// What was uploaded.
    pub(super) async fn content(
        &self,
        name: &str,
    ) -> Result<Pin<Box<dyn AsyncRead + Send>>, Error> {
        let (store, key) = (Arc::clone(&self.store), self.key(name));
        let size = bounded(store.head(&key)).await?.size;
        let piece = move |range| {
            let (store, key) = (Arc::clone(&store), key.clone());
            async move { bounded(store.get_range(&key, range)).await.map_err(io::Error::other) }
        };
        let pieces = stream::iter(ranges(size)).map(piece).buffered(DOWNLOADS_AT_ONCE).boxed();
        Ok(Box::pin(ZstdDecoder::new(StreamReader::new(pieces))))
    }

    pub(super) async fn get(&self, name: &str) -> Result<Bytes, Error> {
        let found = bounded(self.store.get(&self.key(name))).await?;
        bounded(found.bytes()).await
    }

    /// What there is directly below a name, in a folder with what uploads that broke off have left.
    pub(super) async fn names(&self, below: &str) -> Result<Vec<String>, Error> {
        if let Some(folder) = &self.folder {
            let path = folder.join(below);
            return on_disk(move || names(&path)).await;
        }
        let listed = bounded(self.store.list_with_delimiter(Some(&self.key(below)))).await?;
        let objects = listed.objects.into_iter().map(|object| object.location);
        let last = |key: Key| key.filename().map(str::to_owned);
        Ok(objects.chain(listed.common_prefixes).filter_map(last).collect())
    }

    /// One object, or all below a name. Also when there is nothing.
    pub(super) async fn remove(&self, name: &str) -> Result<(), Error> {
        if let Some(folder) = &self.folder {
            // With what an upload that broke off has left.
            let path = folder.join(name);
            return on_disk(move || remove(&path)).await;
        }
        let key = self.key(name);
        let listed = self.store.list(Some(&key)).map_ok(|object| object.location).boxed();
        let listed = listed.chain(futures::stream::once(async move { Ok(key) })).boxed();
        let mut gone = self.store.delete_stream(listed);
        while let Some(next) = timeout(PIECE_DEADLINE, gone.next()).await.map_err(|_| silent())? {
            match next {
                Err(object_store::Error::NotFound { .. }) | Ok(_) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }
}

impl Upload {
    pub(super) async fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let Some((encoder, _)) = &mut self.encoder else { return Err(ended()) };
        let written = timeout(PIECE_DEADLINE, encoder.write_all(bytes)).await;
        written.map_err(|_| silent())?.map_err(failed)
    }

    /// It is in the store when this returns: how many bytes it takes there.
    pub(super) async fn finish(mut self) -> Result<u64, Error> {
        let Some((mut encoder, under_way)) = self.encoder.take() else { return Err(ended()) };
        // It comes to its end also where nobody waits for that any longer: half-way it could not be given up.
        let ending = tokio::spawn(async move {
            let ended = encoder.shutdown().await;
            drop(under_way);
            ended
        });
        let ended = timeout(PIECE_DEADLINE, ending).await.map_err(|_| silent())?;
        ended.map_err(Error::internal)?.map_err(failed)?;
        let bytes = bounded(self.store.store.head(&self.key)).await?.size;
        self.store.check(&self.key, bytes).await?;
        Ok(bytes)
    }

    /// What is there of it goes.
    pub(super) async fn give_up(mut self) {
        if let Some((encoder, under_way)) = self.encoder.take() {
            abort(encoder, under_way).await;
        }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let (Some((encoder, under_way)), Ok(runtime)) =
            (self.encoder.take(), Handle::try_current())
        {
            runtime.spawn(abort(encoder, under_way));
        }
    }
}

async fn abort(mut encoder: ZstdEncoder<BufWriter>, under_way: UnderWay) {
    let aborted = timeout(PIECE_DEADLINE, encoder.get_mut().abort()).await;
    if !matches!(aborted, Ok(Ok(()))) {
        tracing::warn!(key = %under_way.key, "an upload that broke off is left in the store");
    }
}

/// How large the pieces are of what has no more than so many bytes, and how many are on their way at once.
fn pieces_of(most: u64) -> (usize, usize) {
    let piece = most.div_ceil(MOST_PIECES).next_multiple_of(MIB);
    let piece = piece.clamp(*UPLOAD_PIECE.start(), *UPLOAD_PIECE.end());
    let at_once = (UPLOADED_AT_ONCE / piece).clamp(1, UPLOADS_AT_ONCE);
    let small = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    (small(piece), small(at_once))
}

async fn bounded<T>(request: impl Future<Output = object_store::Result<T>>) -> Result<T, Error> {
    timeout(PIECE_DEADLINE, request).await.map_err(|_| silent())?.map_err(failed)
}

async fn on_disk<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.map_err(Error::internal)?.map_err(failed)
}

/// Of content of that size.
fn ranges(size: u64) -> impl Iterator<Item = Range<u64>> + Send {
    let start = |piece: u64| piece * DOWNLOAD_PIECE;
    (0..size.div_ceil(DOWNLOAD_PIECE)).map(move |piece| start(piece)..size.min(start(piece + 1)))
}

fn ended() -> Error {
    Error::internal("an upload is written to after its end")
}

fn silent() -> Error {
    failed("it does not answer in time")
}

/// Told to whoever owns the database: in general terms, as the rest is the operator's.
fn failed(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::new(ErrorCode::Unavailable, "the store of the backups fails; the server's log says how")
        .because(source)
}

fn flush(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()?;
    path.parent().map_or(Ok(()), |parent| File::open(parent)?.sync_all())
}

/// Also when there is nothing.
fn names(directory: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    // Names are ours: text.
    let name = |entry: io::Result<fs::DirEntry>| {
        entry.map(|entry| entry.file_name().to_string_lossy().into_owned())
    };
    entries.map(name).collect()
}

fn remove(path: &Path) -> io::Result<()> {
    let removed = match path.metadata() {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    removed.or_else(
        |error| {
            if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
        },
    )
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    /// Of several pieces, also when it is compressed.
    fn noise() -> Vec<u8> {
        let mut noise = vec![0; 20_000_000];
        rand::fill(&mut noise[..]);
        noise
    }

    #[tokio::test]
    async fn what_is_put_comes_back_and_goes_with_all_that_is_below_it() {
        let directory = tempfile::tempdir().unwrap();
        let store = BackupStore::open(&BackupPlace::Data, directory.path()).unwrap().unwrap();
        let content = [noise(), vec![0; 1 << 20]].concat();
        let mut upload = store.upload("one/base/large", 1);
        for piece in content.chunks(1 << 20) {
            upload.write(piece).await.unwrap();
        }
        let bytes = upload.finish().await.unwrap();
        assert!(bytes > 0 && bytes < content.len() as u64);
        store.put("one/base/small", Bytes::from_static(b"{}")).await.unwrap();
        store.put("two/small", Bytes::from_static(b"{}")).await.unwrap();
        let mut back = Vec::new();
        store.content("one/base/large").await.unwrap().read_to_end(&mut back).await.unwrap();
        assert!(back == content);
        assert_eq!(&store.get("one/base/small").await.unwrap()[..], b"{}");
        let mut names = store.names("one/base").await.unwrap();
        names.sort();
        assert_eq!(names, ["large", "small"]);
        assert_eq!(store.names("one").await.unwrap(), ["base"]);
        store.remove("one").await.unwrap();
        store.remove("one").await.unwrap();
        store.remove("two/small").await.unwrap();
        assert!(store.names("one").await.unwrap().is_empty());
        assert_eq!(store.get("two/small").await.unwrap_err().code, ErrorCode::Unavailable);
    }

    #[tokio::test]
    async fn an_upload_that_is_given_up_is_not_there() {
        let directory = tempfile::tempdir().unwrap();
        let place = BackupPlace::Folder(directory.path().join("elsewhere"));
        let store = BackupStore::open(&place, directory.path()).unwrap().unwrap();
        let mut upload = store.upload("one/large", 1);
        let content = noise();
        upload.write(&content).await.unwrap();
        assert_eq!(store.names("one").await.unwrap().len(), 1, "what is under way");
        upload.give_up().await;
        assert!(store.names("one").await.unwrap().is_empty());
        let mut upload = store.upload("one/large", 1);
        upload.write(&content).await.unwrap();
        drop(upload);
        let gone = async {
            while !store.names("one").await.unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(60), gone).await.unwrap();
    }

    #[tokio::test]
    async fn what_a_server_that_was_killed_left_of_an_upload_is_found_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let store = BackupStore::open(&BackupPlace::Data, directory.path()).unwrap().unwrap();
        store.put("one/wal/0001.zst", Bytes::from_static(b"log")).await.unwrap();
        let left = directory.path().join(FOLDER).join("one/wal/0002.zst#1");
        fs::write(&left, "lo").unwrap();
        let mut names = store.names("one/wal").await.unwrap();
        names.sort();
        assert_eq!(names, ["0001.zst", "0002.zst#1"]);
        store.remove("one/wal/0002.zst#1").await.unwrap();
        assert_eq!(store.names("one/wal").await.unwrap(), ["0001.zst"]);
    }

    #[tokio::test]
    async fn what_is_under_way_is_waited_for_where_it_goes_to() {
        let directory = tempfile::tempdir().unwrap();
        let store = BackupStore::open(&BackupPlace::Data, directory.path()).unwrap().unwrap();
        let mut upload = store.upload("one/wal/large", 1);
        upload.write(&noise()).await.unwrap();
        store.settled("two").await.unwrap();
        let soon = Duration::from_millis(50);
        assert!(timeout(soon, store.settled("one")).await.is_err());
        // Nobody waits for its end, and it is there all the same before the folder is looked at.
        let mut finishing = Box::pin(upload.finish());
        assert!(futures::poll!(finishing.as_mut()).is_pending());
        drop(finishing);
        store.settled("one").await.unwrap();
        assert_eq!(store.names("one/wal").await.unwrap(), ["large"]);
        drop(store.upload("one/wal/other", 1));
        store.put("one/small", Bytes::from_static(b"{}")).await.unwrap();
        store.settled("one").await.unwrap();
        store.remove("one").await.unwrap();
        assert!(store.names("one").await.unwrap().is_empty());
    }

    #[test]
    fn the_pieces_of_an_upload_are_no_more_than_a_storage_takes_and_bounded_in_memory() {
        assert_eq!(pieces_of(1), (8 << 20, 2));
        assert_eq!(pieces_of(70 << 30), (8 << 20, 2));
        assert_eq!(pieces_of(128 << 30), (15 << 20, 2));
        assert_eq!(pieces_of(256 << 30), (30 << 20, 1));
        assert_eq!(pieces_of(u64::MAX), (64 << 20, 1));
        for most in [1, 78 << 30, 128 << 30, 512 << 30] {
            let (piece, _) = pieces_of(most);
            assert!(most.div_ceil(piece as u64) < 10_000, "{most}");
        }
    }

    #[test]
    fn content_is_read_in_pieces_without_a_gap() {
        let pieces = |size| ranges(size).map(|piece| (piece.start, piece.end)).collect::<Vec<_>>();
        let (one, two) = (DOWNLOAD_PIECE, 2 * DOWNLOAD_PIECE);
        assert!(pieces(0).is_empty());
        assert_eq!(pieces(5), [(0, 5)]);
        assert_eq!(pieces(one), [(0, one)]);
        assert_eq!(pieces(two + 1), [(0, one), (one, two), (two, two + 1)]);
    }
}
