//! Uploads by parts: files of any size that come in pieces, in any order and over any number of connections. They are known
//! to the agent alone, so they live as long as the guest runs, and are in its snapshots and forks. Their content lies
//! beside the file that it will become, so that it takes its place in one step.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use protocol::files::{UploadBegin, UploadStatus};
use protocol::message::{ErrorCode, Failure, FileWrite};
use sha2::{Digest, Sha256};

use super::acting::Someone;
use super::write::{Place, Writer, start_writeback};
use crate::failure::{failed, refuse};
use rustix::io::Errno;

/// At once. Each takes some KiB of memory.
const MOST: usize = 64;
/// Of one upload.
const MOST_PARTS: u32 = 100_000;
const PART_SIZES: std::ops::RangeInclusive<u64> = (64 << 10)..=(5 << 30);
/// One that nobody has asked for since is given up.
const STALE: Duration = Duration::from_secs(24 * 3600);
const WRITEBACK: u64 = 4 << 20;
const DIGESTED: usize = 256 << 10;

#[derive(Default)]
pub(crate) struct Uploads {
    all: Mutex<HashMap<String, Upload>>,
}

struct Upload {
    write: FileWrite,
    place: Place,
    part_size: u64,
    /// A bit for each that is there, the first is number 1.
    parts: Vec<u64>,
    /// The one that is shorter than the others, and thus the last.
    short: Option<(u32, u64)>,
    being_written: HashSet<u32>,
    is_completing: bool,
    used: Instant,
}

impl Upload {
    fn has(&self, number: u32) -> bool {
        let at = number as usize - 1;
        self.parts.get(at / 64).is_some_and(|bits| bits & 1 << (at % 64) != 0)
    }

    fn set(&mut self, number: u32, there: bool) {
        let at = number as usize - 1;
        if self.parts.len() <= at / 64 {
            self.parts.resize(at / 64 + 1, 0);
        }
        let bit = 1 << (at % 64);
        if there {
            self.parts[at / 64] |= bit;
        } else {
            self.parts[at / 64] &= !bit;
        }
    }

    fn runs(&self) -> Vec<(u32, u32)> {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        let most = u32::try_from(self.parts.len() * 64).unwrap_or(u32::MAX);
        for number in (1..=most).filter(|&number| self.has(number)) {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == number => *last = number,
                _ => runs.push((number, number)),
            }
        }
        runs
    }

    fn bytes(&self) -> u64 {
        let count: u64 = self.parts.iter().map(|bits| u64::from(bits.count_ones())).sum();
        let missing = match self.short {
            Some((number, length)) if self.has(number) => self.part_size - length,
            Some(_) | None => 0,
        };
        (count * self.part_size).saturating_sub(missing)
    }

    fn status(&self, id: &str, with_parts: bool) -> UploadStatus {
        UploadStatus {
            id: id.to_owned(),
            path: self.place.path.clone().into(),
            size: self.write.size,
            part_size: self.part_size,
            parts: if with_parts { self.runs() } else { Vec::new() },
            bytes: self.bytes(),
        }
    }

    /// Whether a part of this length may have this number.
    fn check(&self, number: u32, length: u64) -> Result<(), Failure> {
        let invalid = |message: String| Err(refuse(ErrorCode::Invalid, message));
        if !(1..=MOST_PARTS).contains(&number) {
            return invalid(format!("parts are numbered from 1 to {MOST_PARTS}"));
        }
        if let Some(size) = self.write.size {
            let start = u64::from(number - 1) * self.part_size;
            let due = size.saturating_sub(start).min(self.part_size);
            if due == 0 && !(size == 0 && number == 1) {
                return invalid(format!("a file of {size} bytes has no part {number}"));
            }
            if length != due {
                return invalid(format!("part {number} must have {due} bytes, not {length}"));
            }
        }
        if length > self.part_size || (length == 0 && number > 1) {
            let most = self.part_size;
            return invalid(format!("a part has 1 to {most} bytes, not {length}"));
        }
        match self.short {
            Some((other, short))
                if length < self.part_size && other != number && self.has(other) =>
            {
                invalid(format!(
                    "part {other} has {short} bytes, so it is the last, and only the last may be shorter than {}; send it again whole first",
                    self.part_size
                ))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// The size of the file, if all its parts are there.
    fn whole(&self, told: Option<u64>) -> Result<u64, Failure> {
        let conflict = |message: String| Err(refuse(ErrorCode::Conflict, message));
        let runs = self.runs();
        let size = match &runs[..] {
            [] if self.write.size.or(told).is_none_or(|size| size == 0) => 0,
            [(1, last)] => {
                if let Some((short, _)) = self.short
                    && short < *last
                    && self.has(short)
                {
                    return conflict(format!(
                        "part {short} is shorter than the others but not the last; send it again whole"
                    ));
                }
                self.bytes()
            }
            [] => return conflict("no part is there yet; send them first".to_owned()),
            [(1, last), ..] => {
                return conflict(format!("part {} is missing; send it first", last + 1));
            }
            [..] => return conflict("part 1 is missing; send it first".to_owned()),
        };
        for expected in [self.write.size, told].into_iter().flatten() {
            if size != expected {
                return conflict(format!(
                    "{size} bytes are there, not {expected}; send what is missing"
                ));
            }
        }
        Ok(size)
    }
}

/// A part on its way. Dropped before it is committed, the part is not there.
pub(crate) struct PartWriter {
    uploads: Arc<Uploads>,
    id: String,
    number: u32,
    file: File,
    path: Vec<u8>,
    start: u64,
    length: u64,
    written: u64,
    written_back: u64,
    is_committed: bool,
}

impl Uploads {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Upload>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn begin(
        &self,
        request: UploadBegin,
        user: Someone,
    ) -> Result<UploadStatus, Failure> {
        let UploadBegin { id, write, part_size } = request;
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if !(1..=64).contains(&id.len()) || !id.bytes().all(is_plain) {
            return Err(refuse(
                ErrorCode::Invalid,
                "the id of an upload is 1 to 64 letters and digits",
            ));
        }
        if !PART_SIZES.contains(&part_size) {
            let message = "`part_size` must be between 65536 (64 KiB) and 5368709120 (5 GiB)";
            return Err(refuse(ErrorCode::Invalid, message));
        }
        if write.size.is_some_and(|size| size.div_ceil(part_size) > u64::from(MOST_PARTS)) {
            let message =
                format!("that are more than {MOST_PARTS} parts; choose a larger `part_size`");
            return Err(refuse(ErrorCode::Invalid, message));
        }
        if let Some(there) = self.all().get(&id) {
            return Ok(there.status(&id, true));
        }
        let place = Writer::begin_in_parts(write.clone(), user)?;
        let upload = Upload {
            write,
            place,
            part_size,
            parts: Vec::new(),
            short: None,
            being_written: HashSet::new(),
            is_completing: false,
            used: Instant::now(),
        };
        let mut all = self.all();
        // The same request, twice at once.
        if let Some(there) = all.get(&id) {
            let status = there.status(&id, true);
            drop(all);
            upload.place.remove();
            return Ok(status);
        }
        if all.len() >= MOST {
            drop(all);
            upload.place.remove();
            let message = format!(
                "{MOST} uploads are under way in this sandbox; complete or abort some first"
            );
            return Err(refuse(ErrorCode::Conflict, message));
        }
        let status = upload.status(&id, true);
        all.insert(id, upload);
        Ok(status)
    }

    pub(crate) fn status(&self, id: &str) -> Result<UploadStatus, Failure> {
        with(&mut self.all(), id, |upload| Ok(upload.status(id, true)))
    }

    pub(crate) fn list(&self) -> Vec<UploadStatus> {
        let all = self.all();
        let mut list: Vec<_> = all.iter().map(|(id, upload)| upload.status(id, false)).collect();
        list.sort_by(|one, other| one.id.cmp(&other.id));
        list
    }

    pub(crate) fn begin_part(
        self: &Arc<Self>,
        id: &str,
        number: u32,
        length: u64,
    ) -> Result<PartWriter, Failure> {
        let (place, start) = with(&mut self.all(), id, |upload| {
            upload.check(number, length)?;
            if upload.is_completing || !upload.being_written.insert(number) {
                return Err(refuse(ErrorCode::Busy, "this part is on its way already"));
            }
            // From now on it is neither what it was nor what it will be.
            upload.set(number, false);
            Ok((upload.place.clone(), u64::from(number - 1) * upload.part_size))
        })?;
        let opened = place.open();
        if opened.is_err() {
            self.end_part(id, number, None);
        }
        Ok(PartWriter {
            file: opened?,
            uploads: Arc::clone(self),
            id: id.to_owned(),
            number,
            path: place.path,
            start,
            length,
            written: 0,
            written_back: 0,
            is_committed: false,
        })
    }

    fn end_part(&self, id: &str, number: u32, length: Option<u64>) {
        let mut all = self.all();
        let Some(upload) = all.get_mut(id) else { return };
        upload.being_written.remove(&number);
        upload.used = Instant::now();
        let Some(length) = length else { return };
        upload.set(number, true);
        if length < upload.part_size {
            upload.short = Some((number, length));
        } else if upload.short.is_some_and(|(short, _)| short == number) {
            upload.short = None;
        }
    }

    /// The file takes its place: bytes and etag.
    pub(crate) fn complete(
        &self,
        id: &str,
        size: Option<u64>,
        sha256: Option<[u8; 32]>,
    ) -> Result<(u64, String), Failure> {
        let (write, place, size) = with(&mut self.all(), id, |upload| {
            if upload.is_completing || !upload.being_written.is_empty() {
                let message = "parts of this upload are still on their way";
                return Err(refuse(ErrorCode::Busy, message));
            }
            let size = upload.whole(size)?;
            upload.is_completing = true;
            Ok((upload.write.clone(), upload.place.clone(), size))
        })?;
        let completed = place.open().and_then(|file| {
            if let Some(expected) = sha256
                && digest(&file, size).map_err(|error| failed("read", &place.path, error))?
                    != expected
            {
                let message = "the SHA-256 of the whole is another; send the parts again";
                return Err(refuse(ErrorCode::PreconditionFailed, message));
            }
            file.set_len(size).map_err(|error| {
                failed("write", &place.path, Errno::from_io_error(&error).unwrap_or(Errno::IO))
            })?;
            Writer::resume(write, place, file, size)?.commit()
        });
        let mut all = self.all();
        if completed.is_ok() {
            all.remove(id);
        } else if let Some(upload) = all.get_mut(id) {
            upload.is_completing = false;
        }
        completed
    }

    pub(crate) fn abort(&self, id: &str) {
        let aborted = self.all().remove(id);
        if let Some(upload) = aborted {
            upload.place.remove();
        }
    }

    pub(crate) fn abort_all(&self) {
        let all = std::mem::take(&mut *self.all());
        for upload in all.into_values() {
            upload.place.remove();
        }
    }

    pub(crate) fn next_stale(&self) -> Option<Instant> {
        let all = self.all();
        let idle = all.values().filter(|upload| upload.being_written.is_empty());
        idle.map(|upload| upload.used + STALE).min()
    }

    pub(crate) fn abort_stale(&self) {
        let now = Instant::now();
        let stale: Vec<_> = self
            .all()
            .extract_if(|_, upload| upload.used + STALE <= now && upload.being_written.is_empty())
            .collect();
        for (_, upload) in stale {
            upload.place.remove();
        }
    }
}

fn with<T>(
    all: &mut HashMap<String, Upload>,
    id: &str,
    work: impl FnOnce(&mut Upload) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let upload = all.get_mut(id).ok_or_else(|| {
        let message = "there is no such upload: it was completed or aborted, its sandbox was stopped meanwhile, or nobody asked for it for a day";
        refuse(ErrorCode::NotFound, message)
    })?;
    upload.used = Instant::now();
    work(upload)
}

fn digest(file: &File, size: u64) -> Result<[u8; 32], Errno> {
    let mut digest = Sha256::new();
    let mut buffer = vec![0; DIGESTED];
    let mut rest = file.take(size);
    loop {
        match rest.read(&mut buffer) {
            Ok(0) => return Ok(digest.finalize().into()),
            Ok(count) => digest.update(&buffer[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
        }
    }
}

impl PartWriter {
    pub(crate) fn append(&mut self, pieces: &[Vec<u8>]) -> Result<(), Failure> {
        for piece in pieces {
            if piece.len() as u64 > self.length - self.written {
                let message = format!("part {} has more than {} bytes", self.number, self.length);
                return Err(refuse(ErrorCode::Invalid, message));
            }
            self.file.write_all_at(piece, self.start + self.written).map_err(|error| {
                failed("write", &self.path, Errno::from_io_error(&error).unwrap_or(Errno::IO))
            })?;
            self.written += piece.len() as u64;
        }
        if self.written - self.written_back >= WRITEBACK {
            let from = self.start + self.written_back;
            start_writeback(&self.file, from, self.written - self.written_back);
            self.written_back = self.written;
        }
        Ok(())
    }

    pub(crate) fn commit(mut self) -> Result<(), Failure> {
        if self.written != self.length {
            let (number, written, length) = (self.number, self.written, self.length);
            let message = format!("part {number} has {written} bytes, not {length}; send it again");
            return Err(refuse(ErrorCode::Invalid, message));
        }
        self.uploads.end_part(&self.id, self.number, Some(self.length));
        self.is_committed = true;
        Ok(())
    }
}

impl Drop for PartWriter {
    fn drop(&mut self) {
        if !self.is_committed {
            self.uploads.end_part(&self.id, self.number, None);
        }
    }
}
