//! Templates: root disks that sandboxes begin with. Addressed by the digest of what they were made from, so names are
//! somebody else's business, and two servers that share the cache share them.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};

use crate::{
    Digest, Error, Layout, Progress, Result,
    bake::{read_manifest, write_manifest},
    debian,
    digest::Hasher,
    draft::{self, Draft},
    ext4,
    lock::Lock,
    pool,
    recipe::ResolvedRecipe,
    tool::Tool,
    tree::{Ids, Tree},
    unpack::{self, Limits},
};

const LABEL: &str = "atoll-root";
/// Longer than a build, so that whoever waits gets its result.
const LOCK_DEADLINE: Duration = Duration::from_secs(3600);
const UNPACK_DEADLINE: Duration = Duration::from_secs(1800);
const ARCHIVE_DEADLINE: Duration = Duration::from_secs(600);
const MOST_ENTRIES: u64 = 2_000_000;
/// Counts up when the same archive would give another disk.
const UNPACKER_VERSION: u32 = 1;
const MIB: u64 = 1 << 20;

#[derive(Debug, Clone)]
pub struct Template {
    pub digest: Digest,
    /// An ext4 file system; never to be written to, only cloned.
    pub rootfs: PathBuf,
    /// What it takes on the host.
    pub size_bytes: u64,
    pub cpu: u32,
    pub memory_mb: u64,
    pub disk_mb: u64,
    /// Commands to run in the guest before it is baked.
    pub warm_up: Vec<String>,
    pub created: SystemTime,
}

/// The default size of a template's sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub cpu: u32,
    pub memory_mb: u64,
    pub disk_mb: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    size_bytes: u64,
    cpu: u32,
    memory_mb: u64,
    disk_mb: u64,
    warm_up: Vec<String>,
}

/// Builds what is not there yet, with the templates it starts from.
pub fn build_from_recipe(
    layout: &Layout,
    recipe: &ResolvedRecipe,
    log: Progress<'_>,
) -> Result<Template> {
    let digest = recipe.digest();
    if let Some(template) = get(layout, &digest)? {
        return Ok(template);
    }
    let parent = match recipe.parent() {
        Some(parent) => Some(build_from_recipe(layout, &parent, log)?),
        None => None,
    };
    let _lock = lock(layout, &digest, log)?;
    if let Some(template) = get(layout, &digest)? {
        return Ok(template);
    }
    let building = Building::start(layout)?;
    let parent_archive = parent.map(|parent| archive_of(layout, &parent.digest));
    debian::build_tree(layout, recipe, parent_archive.as_deref(), &building.tree_path(), log)?;
    let size = Size { cpu: recipe.cpu(), memory_mb: recipe.memory_mb(), disk_mb: recipe.disk_mb() };
    building.finish(layout, &digest, size, Source::Recipe { warm_up: recipe.warm_up() }, log)
}

/// Builds from a user's root file system, a tar archive that may be compressed with gzip, zstd, xz or bzip2.
pub fn build_from_tar(
    layout: &Layout,
    archive: &Path,
    size: Size,
    log: Progress<'_>,
) -> Result<Template> {
    log("reading the archive");
    let content = Digest::of_file(archive)?;
    let digest = Hasher::default()
        .part(b"tar")
        .part(&UNPACKER_VERSION.to_le_bytes())
        .part(content.as_str().as_bytes())
        .part(&size.cpu.to_le_bytes())
        .part(&size.memory_mb.to_le_bytes())
        .part(&size.disk_mb.to_le_bytes())
        .finish();
    let _lock = lock(layout, &digest, log)?;
    if let Some(template) = get(layout, &digest)? {
        return Ok(template);
    }
    let building = Building::start(layout)?;
    let path = building.tree_path();
    fs::create_dir(&path).map_err(Error::io("create", &path))?;
    let tree = Tree::open(&path)?;
    tree.directory(Path::new("/"), 0o755, Ids::ROOT)?;
    let limits = Limits {
        bytes: size.disk_mb * MIB,
        apparent_bytes: size.disk_mb * MIB * 4,
        entries: MOST_ENTRIES,
        time: UNPACK_DEADLINE,
    };
    log("unpacking it");
    unpack::unpack(archive, &tree, limits, log)?;
    check_root(&tree)?;
    add_mount_points(&tree)?;
    building.finish(layout, &digest, size, Source::Archive, log)
}

/// A root file system that nothing could run in is refused while somebody still looks.
fn check_root(tree: &Tree) -> Result<()> {
    let shells = ["/bin/sh", "/usr/bin/sh", "/bin/bash", "/usr/bin/bash", "/bin/busybox"];
    if shells.iter().any(|shell| tree.is_executable(Path::new(shell))) {
        return Ok(());
    }
    let saved_image = ["manifest.json", "oci-layout", "index.json"];
    if saved_image.iter().any(|name| tree.kind(Path::new(name)).is_some()) {
        return Err(Error::archive(
            "it is a saved container image, not a root file system; export a container's file system instead",
        ));
    }
    Err(Error::archive(
        "it holds no shell (/bin/sh); the root file system must lie at the top of the archive, not in a directory of it",
    ))
}

/// Where the agent mounts things.
fn add_mount_points(tree: &Tree) -> Result<()> {
    for (name, mode) in
        [("dev", 0o755), ("proc", 0o555), ("sys", 0o555), ("run", 0o755), ("tmp", 0o1777)]
    {
        let path = Path::new(name);
        if tree.kind(path) != Some(rustix::fs::FileType::Directory) {
            tree.directory(path, mode, Ids::ROOT)?;
        }
    }
    Ok(())
}

fn lock(layout: &Layout, digest: &Digest, log: Progress<'_>) -> Result<Lock> {
    Lock::acquire(&layout.lock("template", Some(digest)), LOCK_DEADLINE, &mut || {
        log("waiting for another process that builds the same template");
    })
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Source {
    /// Others may build on it.
    Recipe {
        warm_up: Vec<String>,
    },
    Archive,
}

/// Two drafts: the tree, which nobody but root may enter and which always goes away, and what is published.
struct Building {
    work: Draft,
    result: Draft,
}

impl Building {
    fn start(layout: &Layout) -> Result<Self> {
        let temporary = layout.cache_temporary();
        let work = Draft::create(&temporary, "tree")?;
        work.keep_others_out()?;
        let result = Draft::create(&temporary, "template")?;
        result.keep_others_out()?;
        Ok(Self { work, result })
    }

    fn tree_path(&self) -> PathBuf {
        self.work.path().join("tree")
    }

    fn finish(
        self,
        layout: &Layout,
        digest: &Digest,
        size: Size,
        source: Source,
        log: Progress<'_>,
    ) -> Result<Template> {
        let tree = self.tree_path();
        let needed_mb = ext4::needed_mb(pool::allocated_bytes(&tree)?);
        if size.disk_mb < needed_mb {
            return Err(Error::DiskTooSmall { wanted_mb: size.disk_mb, minimum_mb: needed_mb });
        }
        if let Source::Recipe { .. } = source {
            log("keeping the tree for templates that build on it");
            let archive = self.result.path().join(TREE_ARCHIVE);
            Tool::new("tar", ARCHIVE_DEADLINE)
                .args([
                    "--create",
                    "--numeric-owner",
                    "--xattrs",
                    "--xattrs-include=*",
                    "--sort=name",
                ])
                .args(["--use-compress-program", "zstd -q -1 -T0"])
                .arg("--file")
                .arg(archive)
                .arg("--directory")
                .arg(&tree)
                .arg(".")
                .run()?;
        }
        log("making the disk");
        let rootfs = self.result.path().join("rootfs");
        ext4::make(&rootfs, size.disk_mb, LABEL, Some(&tree))?;
        let Size { cpu, memory_mb, disk_mb } = size;
        let warm_up = match source {
            Source::Recipe { warm_up } => warm_up,
            Source::Archive => Vec::new(),
        };
        let size_bytes = pool::allocated_bytes(&rootfs)?;
        let manifest = Manifest { size_bytes, cpu, memory_mb, disk_mb, warm_up };
        write_manifest(self.result.path(), &manifest)?;
        self.result.publish(&layout.template(digest))?;
        log(&format!("the template takes {} MB", manifest.size_bytes / 1_000_000));
        get(layout, digest)?
            .ok_or_else(|| Error::NotFound { what: "template", id: digest.to_string() })
    }
}

const TREE_ARCHIVE: &str = "tree.tar.zst";

fn archive_of(layout: &Layout, digest: &Digest) -> PathBuf {
    layout.template(digest).join(TREE_ARCHIVE)
}

pub fn get(layout: &Layout, digest: &Digest) -> Result<Option<Template>> {
    let directory = layout.template(digest);
    let Some(Manifest { size_bytes, cpu, memory_mb, disk_mb, warm_up }) =
        read_manifest(&directory)?
    else {
        return Ok(None);
    };
    let rootfs = directory.join("rootfs");
    let created = match rootfs.metadata().and_then(|metadata| metadata.modified()) {
        Ok(created) => created,
        // Deleted in between.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("stat", rootfs)(error)),
    };
    Ok(Some(Template {
        digest: digest.clone(),
        rootfs,
        size_bytes,
        cpu,
        memory_mb,
        disk_mb,
        warm_up,
        created,
    }))
}

pub fn list(layout: &Layout) -> Result<Vec<Template>> {
    let directory = layout.templates();
    let mut templates = Vec::new();
    for entry in directory.read_dir().map_err(Error::io("list", &directory))? {
        let entry = entry.map_err(Error::io("list", &directory))?;
        if let Some(digest) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
            templates.extend(get(layout, &digest)?);
        }
    }
    Ok(templates)
}

/// Sandboxes made from it keep their disks. Its bakes are for [`crate::bake::remove_of_template`].
pub fn delete(layout: &Layout, digest: &Digest) -> Result<()> {
    draft::discard(&layout.template(digest), &layout.cache_temporary())
}
