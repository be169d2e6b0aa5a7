//! What is mounted, as the kernel lists it (Linux `Documentation/filesystems/proc.rst`, section 3.5), the oldest first.

use rustix::io::Errno;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mounted {
    pub(crate) device: Device,
    /// Of the file system, what is mounted: `/` unless it is a part of it.
    pub(crate) root: Vec<u8>,
    pub(crate) point: Vec<u8>,
    /// Of this mount: `rw,noatime`.
    pub(crate) options: Vec<u8>,
    pub(crate) kind: Vec<u8>,
    /// Of the file system, beginning with `rw` or `ro`.
    pub(crate) all_options: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Device {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

impl Device {
    pub(crate) fn of(number: u64) -> Self {
        Self { major: rustix::fs::major(number), minor: rustix::fs::minor(number) }
    }
}

impl Mounted {
    /// Its content is on a disk of this guest, so that it can be frozen. Nobody's process answers for it.
    pub(crate) fn is_on_disk(&self) -> bool {
        (self.device.major != 0 || self.kind == b"btrfs") && !self.kind.starts_with(b"fuse")
    }

    pub(crate) fn is_writable(&self) -> bool {
        has(&self.all_options, b"rw")
    }

    pub(crate) fn has_option(&self, option: &[u8]) -> bool {
        has(&self.options, option)
    }
}

fn has(options: &[u8], option: &[u8]) -> bool {
    options.split(|&byte| byte == b',').any(|one| one == option)
}

/// As `process` sees it: `self`, or a number.
pub(crate) fn read(process: &str) -> Result<Vec<Mounted>, Errno> {
    let text = std::fs::read(format!("/proc/{process}/mountinfo"))
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    Ok(parse(&text))
}

fn parse(text: &[u8]) -> Vec<Mounted> {
    text.split(|&byte| byte == b'\n').filter_map(line).collect()
}

/// `36 35 98:0 /part /mnt rw,noatime master:1 - ext4 /dev/vdb rw,errors=continue`
fn line(text: &[u8]) -> Option<Mounted> {
    let mut fields = text.split(|&byte| byte == b' ');
    let device = std::str::from_utf8(fields.nth(2)?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let device = Device { major: major.parse().ok()?, minor: minor.parse().ok()? };
    let (root, point) = (unescaped(fields.next()?), unescaped(fields.next()?));
    let options = fields.next()?.to_vec();
    let kind = fields.by_ref().skip_while(|field| *field != b"-").nth(1)?.to_vec();
    let all_options = fields.nth(1)?.to_vec();
    Some(Mounted { device, root, point, options, kind, all_options })
}

/// Blanks and backslashes are written as `\` and three octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut at = 0;
    while let Some(&byte) = field.get(at) {
        let digits = field.get(at + 1..at + 4).filter(|_| byte == b'\\');
        let octal =
            digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        plain.push(octal.unwrap_or(byte));
        at += if octal.is_some() { 4 } else { 1 };
    }
    plain
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_line_is_read_with_and_without_what_is_optional() {
        let text = b"22 1 254:0 / / rw,noatime - ext4 /dev/vda rw,lazytime\n\
            36 22 254:16 /part /mnt/my\\040data ro,nosuid shared:1 master:2 - ext4 /dev/vdb ro\n\
            40 22 0:21 / /run rw - tmpfs tmpfs rw,size=1k\nbroken\n";
        let mounts = parse(text);
        assert_eq!(mounts.len(), 3);
        let (root, data, run) = (&mounts[0], &mounts[1], &mounts[2]);
        assert!(root.is_on_disk() && root.is_writable() && root.has_option(b"noatime"));
        assert_eq!(data.device, Device { major: 254, minor: 16 });
        assert_eq!((&data.root[..], &data.point[..]), (&b"/part"[..], &b"/mnt/my data"[..]));
        assert!(!data.is_writable() && data.has_option(b"ro"));
        assert!(!run.is_on_disk());
    }

    #[test]
    fn what_a_process_answers_for_is_not_on_a_disk() {
        let text =
            b"1 1 0:50 / /a rw - fuse.sshfs host: rw\n2 1 7:0 / /b rw - fuseblk /dev/loop0 rw\n\
            3 1 0:51 / /c rw - btrfs /dev/vdb rw\n";
        let on_disk: Vec<_> = parse(text).iter().map(Mounted::is_on_disk).collect();
        assert_eq!(on_disk, [false, false, true]);
    }

    proptest! {
        #[test]
        fn no_line_is_too_strange(text in prop::collection::vec(any::<u8>(), 0..300)) {
            parse(&text);
        }
    }
}
