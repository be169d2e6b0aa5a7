//! The guest kernel: Debian's cloud kernel and the modules that its machine needs, fetched once and then kept until a
//! rebuild is asked for, because its digest is part of every bake's key.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{BufReader, Read},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    Digest, Error, Layout, Progress, Result, digest::Hasher, draft::Draft, lock::Lock, tool::Tool,
};

const PACKAGE: &str = "linux-image-cloud-amd64";
const SUITE: &str = "trixie";
const FETCH_DEADLINE: Duration = Duration::from_secs(600);
const TOOL_DEADLINE: Duration = Duration::from_secs(60);
/// Longer than a fetch, so that whoever waits gets its result.
const LOCK_DEADLINE: Duration = Duration::from_secs(900);

/// Without these no guest comes up. Some are built into the kernel.
const NEEDED: [&str; 7] =
    ["virtio_pci", "virtio_blk", "virtio_net", "virtio_console", "virtio_rng", "vmgenid", "ext4"];
/// What users' programs ask for: containers, tunnels, disk images.
const USEFUL: [&str; 9] =
    ["overlay", "fuse", "tun", "loop", "veth", "bridge", "nft_chain_nat", "nft_masq", "nft_compat"];

#[derive(Debug, Clone)]
pub struct Kernel {
    pub vmlinuz: PathBuf,
    /// Decompressed, in an order in which each finds what it depends on loaded.
    pub modules: Vec<PathBuf>,
    /// As `uname -r` says in the guest.
    pub release: String,
    pub digest: Digest,
}

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    release: String,
    modules: Vec<String>,
}

/// The kernel in use; fetched when there is none.
pub fn ensure_kernel(layout: &Layout, progress: Progress<'_>) -> Result<Kernel> {
    if let Some(kernel) = current(layout)? {
        return Ok(kernel);
    }
    let _lock = lock(layout, progress)?;
    match current(layout)? {
        Some(kernel) => Ok(kernel),
        None => fetch(layout, progress),
    }
}

/// Fetches what Debian has now and uses that from then on. The previous kernel stays: bakes made with it name it.
pub fn rebuild_kernel(layout: &Layout, progress: Progress<'_>) -> Result<Kernel> {
    let _lock = lock(layout, progress)?;
    fetch(layout, progress)
}

fn lock(layout: &Layout, progress: Progress<'_>) -> Result<Lock> {
    Lock::acquire(&layout.lock("kernel", None), LOCK_DEADLINE, &mut || {
        progress("waiting for another process that fetches the kernel");
    })
}

/// The kernel in use, if one was fetched.
pub fn current(layout: &Layout) -> Result<Option<Kernel>> {
    let path = layout.current_kernel();
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("read", path)(error)),
    };
    let digest = text
        .trim()
        .parse::<Digest>()
        .map_err(|error| Error::Damaged { path: path.clone(), reason: error.to_string() })?;
    let directory = layout.kernel(&digest);
    let manifest_path = directory.join("manifest.json");
    let manifest = match fs::read(&manifest_path) {
        Ok(bytes) => bytes,
        // Someone cleaned up by hand.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("read", manifest_path)(error)),
    };
    let manifest: Manifest = serde_json::from_slice(&manifest)
        .map_err(|error| Error::Damaged { path: manifest_path, reason: error.to_string() })?;
    Ok(Some(Kernel {
        vmlinuz: directory.join("vmlinuz"),
        modules: manifest.modules.iter().map(|name| directory.join(name)).collect(),
        release: manifest.release,
        digest,
    }))
}

fn fetch(layout: &Layout, progress: Progress<'_>) -> Result<Kernel> {
    progress("fetching the guest kernel");
    let work = Draft::create(&layout.cache_temporary(), "kernel-package")?;
    let package = work.path().join("package.tar");
    Tool::new("mmdebstrap", FETCH_DEADLINE)
        .args(["--quiet", "--variant=extract", "--format=tar", "--aptopt=Acquire::Retries \"3\""])
        .arg(format!("--include={PACKAGE}"))
        .arg(SUITE)
        .arg(&package)
        .env("TMPDIR", work.path())
        .run_with(progress)?;
    let contents = extract(&package, work.path())?;
    progress("decompressing its modules");
    let modules =
        Modules { files: &contents.modules, builtin: &contents.builtin, directory: work.path() }
            .resolve()?;

    let draft = Draft::create(&layout.cache_temporary(), "kernel")?;
    let vmlinuz = draft.path().join("vmlinuz");
    fs::rename(&contents.vmlinuz, &vmlinuz).map_err(Error::io("move", &vmlinuz))?;
    let image = fs::read(&vmlinuz).map_err(Error::io("read", &vmlinuz))?;
    let mut hasher = Hasher::default().part(contents.release.as_bytes()).part(&image);
    let mut names = Vec::new();
    for (place, (module, bytes)) in modules.iter().enumerate() {
        let name = format!("{place:02}-{module}.ko");
        hasher = hasher.part(name.as_bytes()).part(bytes);
        let path = draft.path().join(&name);
        fs::write(&path, bytes).map_err(Error::io("write", path))?;
        names.push(name);
    }
    let digest = hasher.finish();
    let manifest = Manifest { release: contents.release, modules: names };
    let path = draft.path().join("manifest.json");
    fs::write(&path, serde_json::to_vec_pretty(&manifest).expect("a manifest is plain data"))
        .map_err(Error::io("write", path))?;
    // The machine's process, another user, reads the kernel by name.
    fs::set_permissions(draft.path(), fs::Permissions::from_mode(0o755))
        .map_err(Error::io("set the mode of", draft.path()))?;
    draft.publish(&layout.kernel(&digest))?;

    let pointer = Draft::create(&layout.cache_temporary(), "kernel-pointer")?;
    let path = pointer.path().join("current");
    fs::write(&path, digest.as_str()).map_err(Error::io("write", path))?;
    pointer.publish_file("current", &layout.current_kernel())?;
    progress(&format!("kernel {} is ready", manifest.release));
    current(layout)?.ok_or_else(|| Error::Damaged {
        path: layout.kernel(&digest),
        reason: "it vanished right after it was made".to_owned(),
    })
}

struct Contents {
    release: String,
    vmlinuz: PathBuf,
    /// By name with `_` for `-`, as the kernel compares them.
    modules: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
}

/// Takes the kernel's files out of the package's tree; only their base names are used.
fn extract(package: &Path, directory: &Path) -> Result<Contents> {
    let file = File::open(package).map_err(Error::io("open", package))?;
    let mut archive = tar::Archive::new(BufReader::new(file));
    let mut release = None;
    let mut modules = BTreeMap::new();
    let mut builtin = BTreeSet::new();
    let vmlinuz = directory.join("vmlinuz");
    for entry in archive.entries().map_err(Error::io("read", package))? {
        let mut entry = entry.map_err(Error::io("read", package))?;
        let path = entry.path().map_err(Error::io("read", package))?.into_owned();
        let (Some(name), true) =
            (path.file_name().and_then(|n| n.to_str()), entry.header().entry_type().is_file())
        else {
            continue;
        };
        let target = if let Some(found) = name.strip_prefix("vmlinuz-") {
            release = Some(found.to_owned());
            vmlinuz.clone()
        } else if name == "modules.builtin" {
            let mut text = String::new();
            entry.read_to_string(&mut text).map_err(Error::io("read", package))?;
            builtin.extend(text.lines().filter_map(|line| module_name(line.rsplit('/').next()?)));
            continue;
        } else if let Some(module) = module_name(name) {
            let target = directory.join(name);
            modules.insert(module, target.clone());
            target
        } else {
            continue;
        };
        let mut output = File::create(&target).map_err(Error::io("create", &target))?;
        std::io::copy(&mut entry, &mut output).map_err(Error::io("write", &target))?;
    }
    let release = release.ok_or_else(|| Error::KernelIncomplete { what: "vmlinuz".to_owned() })?;
    Ok(Contents { release, vmlinuz, modules, builtin })
}

/// `virtio-rng.ko.xz` is `virtio_rng`.
fn module_name(file: &str) -> Option<String> {
    let (name, end) = file.split_once(".ko")?;
    matches!(end, "" | ".xz" | ".zst" | ".gz").then(|| name.replace('-', "_"))
}

struct Modules<'a> {
    files: &'a BTreeMap<String, PathBuf>,
    builtin: &'a BTreeSet<String>,
    directory: &'a Path,
}

impl Modules<'_> {
    /// Name and code, dependencies first.
    fn resolve(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let mut resolved = Vec::new();
        for name in NEEDED {
            self.add(name, &mut resolved)?;
        }
        for name in USEFUL {
            if self.files.contains_key(name) {
                self.add(name, &mut resolved)?;
            }
        }
        Ok(resolved)
    }

    fn add(&self, name: &str, resolved: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
        if self.builtin.contains(name) || resolved.iter().any(|(done, _)| done == name) {
            return Ok(());
        }
        let file = self
            .files
            .get(name)
            .ok_or_else(|| Error::KernelIncomplete { what: format!("the module {name}") })?;
        let code = self.decompress(name, file)?;
        for dependency in dependencies(&code) {
            // The kernel refuses cycles when it is built.
            self.add(&dependency, resolved)?;
        }
        resolved.push((name.to_owned(), code));
        Ok(())
    }

    fn decompress(&self, name: &str, file: &Path) -> Result<Vec<u8>> {
        let tool = match file.extension().and_then(|e| e.to_str()) {
            Some("xz") => "xz",
            Some("zst") => "zstd",
            Some("gz") => "gzip",
            Some(_) | None => return fs::read(file).map_err(Error::io("read", file)),
        };
        let path = self.directory.join(format!("{name}.plain"));
        let output = File::create(&path).map_err(Error::io("create", &path))?;
        Tool::new(tool, TOOL_DEADLINE).args(["-d", "-c"]).arg(file).output_to(output).run()?;
        fs::read(&path).map_err(Error::io("read", path))
    }
}

/// A module says in its `.modinfo` what it needs: strings that end in a zero byte, one of them `depends=a,b`.
fn dependencies(code: &[u8]) -> Vec<String> {
    code.split(|&byte| byte == 0)
        .find_map(|text| text.strip_prefix(b"depends="))
        .and_then(|names| std::str::from_utf8(names).ok())
        .map(|names| {
            names.split(',').filter(|n| !n.is_empty()).map(|n| n.replace('-', "_")).collect()
        })
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(depends: &str) -> Vec<u8> {
        format!("\x7fELF junk\0license=GPL\0depends={depends}\0name=x\0").into_bytes()
    }

    #[test]
    fn a_module_comes_after_what_it_depends_on() {
        let directory = tempfile::tempdir().unwrap();
        let mut files = BTreeMap::new();
        let mut builtin: BTreeSet<String> = NEEDED.iter().map(|n| (*n).to_owned()).collect();
        builtin.remove("virtio_net");
        for (name, depends) in
            [("virtio_net", "net-failover"), ("net_failover", "failover,ext4"), ("failover", "")]
        {
            let path = directory.path().join(format!("{name}.ko"));
            fs::write(&path, module(depends)).unwrap();
            files.insert(name.to_owned(), path);
        }
        let modules = Modules { files: &files, builtin: &builtin, directory: directory.path() };
        let order: Vec<_> = modules.resolve().unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(order, ["failover", "net_failover", "virtio_net"]);
    }

    #[test]
    fn a_kernel_without_a_needed_module_is_refused() {
        let modules = Modules {
            files: &BTreeMap::new(),
            builtin: &BTreeSet::new(),
            directory: Path::new("/"),
        };
        assert!(matches!(modules.resolve(), Err(Error::KernelIncomplete { .. })));
    }
}
