//! One stream of an exec, as far as the host has it: the newest in memory, the rest in a file.

use std::{fs::File, sync::Arc};

use bytes::{Bytes, BytesMut};

#[derive(Debug)]
pub(super) struct Kept {
    /// Bytes that came, whether they are kept or not: where to go on with the guest.
    received: u64,
    /// What comes beyond is counted and dropped.
    limit: u64,
    in_file: u64,
    on_the_way: Option<Bytes>,
    newest: BytesMut,
    file: Option<Arc<File>>,
}

/// Bytes for the file; tell [`Kept::written`] what came of it.
#[derive(Debug)]
pub(super) struct Spill {
    pub(super) at: u64,
    pub(super) bytes: Bytes,
    pub(super) file: Option<Arc<File>>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// Nothing is kept from there on.
    Nothing,
    Bytes(Bytes),
    InFile {
        length: usize,
    },
}

impl Kept {
    /// The file has so many bytes already.
    pub(super) fn new(limit: u64, in_file: u64) -> Self {
        Self {
            received: in_file,
            limit: limit.max(in_file),
            in_file,
            on_the_way: None,
            newest: BytesMut::new(),
            file: None,
        }
    }

    pub(super) fn received(&self) -> u64 {
        self.received
    }

    pub(super) fn kept(&self) -> u64 {
        self.in_file + self.in_memory() as u64
    }

    pub(super) fn in_memory(&self) -> usize {
        self.on_the_way.as_ref().map_or(0, Bytes::len) + self.newest.len()
    }

    pub(super) fn is_cut(&self) -> bool {
        self.received > self.kept()
    }

    /// How many of so many bytes would be kept.
    pub(super) fn room_for(&self, length: usize) -> usize {
        let room = self.limit - self.kept();
        length.min(usize::try_from(room).unwrap_or(usize::MAX))
    }

    /// Keeps the first `kept` of these bytes; when that is not all, nothing more is kept from here on.
    pub(super) fn push(&mut self, bytes: &[u8], kept: usize) {
        self.received += bytes.len() as u64;
        self.newest.extend_from_slice(&bytes[..kept]);
        if kept < bytes.len() {
            self.limit = self.kept();
        }
    }

    /// What should go to the file now, when more than `least` bytes wait.
    pub(super) fn spill(&mut self, least: usize) -> Option<Spill> {
        if self.on_the_way.is_some() || self.newest.len() <= least {
            return None;
        }
        let bytes = self.newest.split().freeze();
        self.on_the_way = Some(bytes.clone());
        Some(Spill { at: self.in_file, bytes, file: self.file.clone() })
    }

    /// With the file it was written to; `None`: there was no room, and what could not be written is gone.
    pub(super) fn written(&mut self, file: Option<Arc<File>>) {
        let Some(bytes) = self.on_the_way.take() else { return };
        match file {
            Some(file) => {
                self.in_file += bytes.len() as u64;
                self.file = Some(file);
            }
            None => {
                self.newest = BytesMut::new();
                self.limit = self.in_file;
            }
        }
    }

    pub(super) fn has_file(&self) -> bool {
        self.in_file > 0
    }

    pub(super) fn file(&self) -> Option<Arc<File>> {
        self.file.clone()
    }

    /// All of it, where no part is in the file.
    pub(super) fn whole(&self) -> Vec<u8> {
        let on_the_way = self.on_the_way.as_deref().unwrap_or_default();
        [on_the_way, &self.newest[..]].concat()
    }

    pub(super) fn read(&self, offset: u64, most: usize) -> Piece {
        let on_the_way = self.on_the_way.clone().unwrap_or_default();
        if offset < self.in_file {
            let left = usize::try_from(self.in_file - offset).unwrap_or(usize::MAX);
            return Piece::InFile { length: left.min(most) };
        }
        let Ok(at) = usize::try_from(offset - self.in_file) else { return Piece::Nothing };
        if at < on_the_way.len() {
            return Piece::Bytes(
                on_the_way.slice(at..on_the_way.len().min(at.saturating_add(most))),
            );
        }
        let newest = self.newest.get(at - on_the_way.len()..).unwrap_or_default();
        match &newest[..newest.len().min(most)] {
            [] => Piece::Nothing,
            bytes => Piece::Bytes(Bytes::copy_from_slice(bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use proptest::prelude::*;

    use super::*;

    fn all_of(kept: &Kept, file: &File, page: usize) -> Vec<u8> {
        let mut whole = Vec::new();
        loop {
            match kept.read(whole.len() as u64, page) {
                Piece::Nothing => return whole,
                Piece::Bytes(bytes) => whole.extend_from_slice(&bytes),
                Piece::InFile { length } => {
                    let mut bytes = vec![0; length];
                    file.read_exact_at(&mut bytes, whole.len() as u64).unwrap();
                    whole.extend_from_slice(&bytes);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn what_is_kept_is_the_beginning_of_what_came(pieces in prop::collection::vec((0usize..40, 0u8..4), 1..30),
                limit in 0u64..400, page in 1usize..50) {
            let file = Arc::new(tempfile::tempfile().unwrap());
            let (mut kept, mut came, mut spill) = (Kept::new(limit, 0), Vec::new(), None);
            for (length, then) in pieces {
                let piece: Vec<u8> = (0..length).map(|byte| (byte + came.len()) as u8).collect();
                came.extend_from_slice(&piece);
                kept.push(&piece, kept.room_for(piece.len()));
                match then {
                    0 => spill = spill.or_else(|| kept.spill(10)),
                    1 => if let Some(Spill { at, bytes, .. }) = spill.take() {
                        file.write_all_at(&bytes, at).unwrap();
                        kept.written(Some(Arc::clone(&file)));
                    },
                    2 if came.len() > 300 && spill.take().is_some() => kept.written(None),
                    _ => {}
                }
                let all = all_of(&kept, &file, page);
                prop_assert_eq!(all.len() as u64, kept.kept());
                prop_assert!(came.starts_with(&all));
                prop_assert!(all.len() as u64 <= limit);
                prop_assert_eq!(kept.received(), came.len() as u64);
                prop_assert_eq!(kept.is_cut(), all.len() < came.len());
            }
        }
    }
}
