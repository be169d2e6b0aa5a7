//! The archive that the guest kernel starts from: the agent as `/init`, and the kernel's modules. Written here so that
//! equal inputs give equal bytes on every host.

use std::{fs, path::PathBuf};

use crate::{Digest, Error, Layout, Result, draft::Draft, kernel::Kernel};

#[derive(Debug, Clone)]
pub struct Initramfs {
    pub path: PathBuf,
    pub digest: Digest,
}

/// Not compressed: it is read from the page cache, and an emulated guest decompresses slowly.
pub fn build(layout: &Layout, kernel: &Kernel, agent: &[u8]) -> Result<Initramfs> {
    let mut archive = Archive::default();
    for name in ["dev", "proc", "sys", "run", "tmp", "root", "mnt", "modules"] {
        archive.add(name, 0o040_755, Device::NONE, b"");
    }
    // Where the kernel opens PID 1's standard streams, before anything is mounted on /dev.
    archive.add("dev/console", 0o020_600, Device { major: 5, minor: 1 }, b"");
    archive.add("dev/null", 0o020_666, Device { major: 1, minor: 3 }, b"");
    archive.add("init", 0o100_755, Device::NONE, agent);
    for module in &kernel.modules {
        let name = module.file_name().and_then(|n| n.to_str()).ok_or_else(|| Error::Damaged {
            path: module.clone(),
            reason: "a module without a name".to_owned(),
        })?;
        let code = fs::read(module).map_err(Error::io("read", module))?;
        archive.add(&format!("modules/{name}"), 0o100_644, Device::NONE, &code);
    }
    let bytes = archive.finish();
    let digest = Digest::of(&bytes);
    let path = layout.initramfs(&digest);
    if !path.exists() {
        let draft = Draft::create(&layout.cache_temporary(), "initramfs")?;
        let draft_path = draft.path().join("initramfs");
        fs::write(&draft_path, bytes).map_err(Error::io("write", draft_path))?;
        draft.publish_file("initramfs", &path)?;
    }
    Ok(Initramfs { path, digest })
}

/// Of a device node; zero for everything else.
#[derive(Clone, Copy)]
struct Device {
    major: u32,
    minor: u32,
}

impl Device {
    const NONE: Self = Self { major: 0, minor: 0 };
}

/// The "new ASCII" cpio format, the only one the kernel takes: a header of hexadecimal numbers, name and content, each
/// padded to four bytes.
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn add(&mut self, name: &str, mode: u32, device: Device, content: &[u8]) {
        self.entries += 1;
        let inode = self.entries;
        self.entry(name, inode, mode, device, content);
    }

    fn entry(&mut self, name: &str, inode: u32, mode: u32, device: Device, content: &[u8]) {
        let links = if mode & 0o170_000 == 0o040_000 { 2 } else { 1 };
        let size = u32::try_from(content.len()).expect("modules and agent are below 4 GiB");
        let name_size = u32::try_from(name.len() + 1).expect("names are ours and short");
        // inode, mode, uid, gid, links, time, size, device, device of a node, name size, checksum
        let numbers =
            [inode, mode, 0, 0, links, 0, size, 0, 0, device.major, device.minor, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for number in numbers {
            self.bytes.extend_from_slice(format!("{number:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, 0, Device::NONE, b"");
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write as _,
        process::{Command, Stdio},
    };

    use super::*;

    fn made(directory: &std::path::Path, agent: &[u8]) -> Initramfs {
        let layout = Layout::create(directory.join("data"), directory.join("cache")).unwrap();
        let module = directory.join("00-virtio_blk.ko");
        fs::write(&module, b"code").unwrap();
        let kernel = Kernel {
            vmlinuz: directory.join("vmlinuz"),
            modules: vec![module],
            release: "6".to_owned(),
            digest: Digest::of(b""),
        };
        build(&layout, &kernel, agent).unwrap()
    }

    #[test]
    fn cpio_reads_the_archive() {
        let directory = tempfile::tempdir().unwrap();
        let initramfs = made(directory.path(), b"agent!");
        let mut cpio = Command::new("cpio")
            .args(["-t", "--quiet", "-v"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        cpio.stdin.take().unwrap().write_all(&fs::read(initramfs.path).unwrap()).unwrap();
        let output = cpio.wait_with_output().unwrap();
        assert!(output.status.success());
        let listing = String::from_utf8(output.stdout).unwrap();
        let names: Vec<_> =
            listing.lines().filter_map(|line| line.split_whitespace().last()).collect();
        let expected = "dev proc sys run tmp root mnt modules dev/console dev/null init modules/00-virtio_blk.ko";
        assert_eq!(names.join(" "), expected);
        assert!(listing.lines().any(|l| l.starts_with("crw-------")
            && l.contains("5,")
            && l.ends_with("dev/console")));
        assert!(
            listing
                .lines()
                .any(|l| l.starts_with("-rwxr-xr-x") && l.contains(" 6 ") && l.ends_with(" init"))
        );
    }

    #[test]
    fn equal_inputs_give_equal_archives() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        assert_eq!(made(one.path(), b"agent").digest, made(two.path(), b"agent").digest);
        assert_ne!(made(one.path(), b"agent").digest, made(two.path(), b"another").digest);
    }
}
