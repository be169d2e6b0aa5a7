//! Builds a tree from a recipe with Debian's packages, through `mmdebstrap`.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    Error, Layout, Progress, Result,
    lock::Lock,
    recipe::{Owner, ResolvedRecipe, TreeChanges, User},
    tool::Tool,
    tree::{Ids, Tree},
};

const DEADLINE: Duration = Duration::from_secs(1800);
const LOCK_DEADLINE: Duration = Duration::from_secs(60);
const FIRST_USER: u32 = 1000;
const TOLD_EVERY: usize = 50;

/// Before apt runs in the new tree: what it starts from, and packages that were downloaded before.
const BEFORE: &str = r#"set -eu
if [ -n "$ATOLL_PARENT" ]; then
    tar --extract --numeric-owner --xattrs --xattrs-include='*' --use-compress-program='zstd -q -d' --file "$ATOLL_PARENT" --directory "$1"
fi
mkdir -p "$1/var/cache/apt/archives/partial"
find "$ATOLL_PACKAGES" -name '*.deb' -exec cp --reflink=auto --preserve=timestamps --target-directory "$1/var/cache/apt/archives" {} +"#;

/// After it: keeps what was downloaded, for the next build.
const AFTER: &str = r#"set -eu
find "$1/var/cache/apt/archives" -name '*.deb' -exec cp --reflink=auto --preserve=timestamps --update --target-directory "$ATOLL_PACKAGES" {} +"#;

/// `target` must not exist. `parent` is the archive of the tree that the recipe starts from.
pub(crate) fn build_tree(
    layout: &Layout,
    recipe: &ResolvedRecipe,
    parent: Option<&Path>,
    target: &Path,
    log: Progress<'_>,
) -> Result<()> {
    let changes = recipe.tree();
    bootstrap(layout, recipe, parent, target, log)?;
    let tree = Tree::open(target)?;
    forget_the_host(&tree)?;
    apply(&tree, changes)
}

fn bootstrap(
    layout: &Layout,
    recipe: &ResolvedRecipe,
    parent: Option<&Path>,
    target: &Path,
    log: Progress<'_>,
) -> Result<()> {
    // The packages that were downloaded before must not be pruned while they are copied.
    let _packages = Lock::acquire_shared(&layout.packages(), LOCK_DEADLINE)?;
    let packages = &recipe.tree().packages;
    let variant = if parent.is_some() { "custom" } else { "minbase" };
    // In namespaces of its own, so that nothing it mounts is ever seen (or emptied) from outside, and nothing it starts
    // outlives it or us.
    let mut tool = Tool::new("setpriv", DEADLINE)
        .args([
            "--pdeathsig",
            "KILL",
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child=KILL",
            "--mount-proc",
        ])
        .args(["mmdebstrap", "--verbose", "--mode=root", "--format=directory"])
        .arg(format!("--variant={variant}"))
        // Nobody needs a package on the disk before the template is complete.
        .arg("--dpkgopt=force-unsafe-io")
        .args(
            ["man", "info", "locale", "doc"]
                .map(|name| format!("--dpkgopt=path-exclude=/usr/share/{name}/*")),
        )
        .arg("--dpkgopt=path-include=/usr/share/doc/*/copyright")
        .args(["--aptopt=Acquire::Retries \"3\"", "--aptopt=Acquire::Languages \"none\""])
        // The packages in the cache make the directory look used.
        .args(["--skip=download/empty", "--skip=essential/unlink"])
        .arg(format!("--setup-hook={BEFORE}"))
        .arg(format!("--customize-hook={AFTER}"))
        .env("ATOLL_PARENT", parent.unwrap_or(Path::new("")))
        .env("ATOLL_PACKAGES", layout.packages());
    if !packages.is_empty() {
        tool = tool.arg(format!("--include={}", packages.join(",")));
    }
    let mut milestones = Milestones::default();
    let result = tool.arg(recipe.suite()).arg(target).run_with(&mut |line| {
        if let Some(told) = milestones.hear(line) {
            log(&told);
        }
    });
    match result {
        Err(Error::ToolFailed { output, .. }) if !milestones.unknown.is_empty() => Err(Error::InvalidRecipe {
            problems: milestones
                .unknown
                .iter()
                .map(|name| format!("packages: {} has no package `{name}`; correct the name or leave it out", recipe.suite()))
                .chain(output.is_empty().then(String::new))
                .collect(),
        }),
        Err(error) => Err(error),
        Ok(_) => Ok(()),
    }
}

/// Of the thousands of lines of a bootstrap, those worth a look.
#[derive(Default)]
struct Milestones {
    configured: usize,
    unknown: Vec<String>,
}

impl Milestones {
    fn hear(&mut self, line: &str) -> Option<String> {
        if let Some(name) = line.strip_prefix("E: Unable to locate package ") {
            self.unknown.push(name.to_owned());
        }
        if line.starts_with("Setting up ") {
            self.configured += 1;
            let told = self.configured.is_multiple_of(TOLD_EVERY);
            return told.then(|| format!("configured {} packages", self.configured));
        }
        // The tree is nobody's business but root's, and apt's own user is not needed: signatures are checked either way.
        if line.starts_with("W: Download is performed unsandboxed") {
            return None;
        }
        if line.starts_with("E: ") || line.starts_with("W: ") || line.starts_with("Fetched ") {
            return Some(line.to_owned());
        }
        let step = line.strip_prefix("I: ")?;
        let ours = step.contains("-hook")
            || step.starts_with("skipping")
            || step.contains("automatically chosen");
        (!ours).then(|| step.to_owned())
    }
}

/// mmdebstrap copies the host's name and resolvers.
fn forget_the_host(tree: &Tree) -> Result<()> {
    // The agent sets these when a sandbox starts.
    for (path, content) in [
        ("/etc/hostname", "sandbox\n"),
        ("/etc/hosts", "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"),
        ("/etc/resolv.conf", ""),
        ("/etc/machine-id", ""),
    ] {
        tree.write(Path::new(path), content.as_bytes(), 0o644, Ids::ROOT)?;
    }
    Ok(())
}

fn apply(tree: &Tree, changes: &TreeChanges) -> Result<()> {
    let mut accounts = Accounts::read(tree)?;
    for user in &changes.users {
        let home = accounts.add(user)?;
        accounts.write(tree)?;
        tree.directory(
            &home,
            0o755,
            accounts.ids(&Owner { user: user.name.clone(), group: user.name.clone() })?,
        )?;
        copy_skeleton(
            tree,
            &home,
            accounts.ids(&Owner { user: user.name.clone(), group: user.name.clone() })?,
        )?;
    }
    for directory in &changes.directories {
        tree.directory(
            Path::new(&directory.path),
            directory.mode.bits(),
            accounts.ids(&directory.owner)?,
        )?;
    }
    for link in &changes.links {
        tree.link(Path::new(&link.path), Path::new(&link.target), Ids::ROOT)?;
    }
    for file in &changes.files {
        let owner = accounts.ids(&file.owner)?;
        tree.write(Path::new(&file.path), file.content.as_bytes(), file.mode.bits(), owner)?;
    }
    Ok(())
}

/// The files that a new home begins with.
fn copy_skeleton(tree: &Tree, home: &Path, owner: Ids) -> Result<()> {
    for name in [".bashrc", ".profile", ".bash_logout"] {
        if let Some(content) = tree.read(&Path::new("/etc/skel").join(name))? {
            tree.write(&home.join(name), &content, 0o644, owner)?;
        }
    }
    Ok(())
}

/// The tree's users and groups.
struct Accounts {
    passwd: String,
    group: String,
    shadow: Option<String>,
    gshadow: Option<String>,
}

impl Accounts {
    fn read(tree: &Tree) -> Result<Self> {
        let text = |path: &str| -> Result<Option<String>> {
            let bytes = tree.read(Path::new(path))?;
            Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
        };
        Ok(Self {
            passwd: text(PASSWD)?.unwrap_or_default(),
            group: text(GROUP)?.unwrap_or_default(),
            shadow: text(SHADOW)?,
            gshadow: text(GSHADOW)?,
        })
    }

    fn write(&self, tree: &Tree) -> Result<()> {
        tree.rewrite(Path::new(PASSWD), self.passwd.as_bytes())?;
        tree.rewrite(Path::new(GROUP), self.group.as_bytes())?;
        for (path, content) in [(SHADOW, &self.shadow), (GSHADOW, &self.gshadow)] {
            if let Some(content) = content {
                tree.rewrite(Path::new(path), content.as_bytes())?;
            }
        }
        Ok(())
    }

    /// The home of the user, who may be there already.
    fn add(&mut self, user: &User) -> Result<PathBuf> {
        let home = user.home.clone().unwrap_or_else(|| format!("/home/{}", user.name));
        if number_of(&self.passwd, &user.name).is_some() {
            return Ok(home.into());
        }
        let number = self.free_number();
        let name = &user.name;
        append(&mut self.passwd, &format!("{name}:x:{number}:{number}::{home}:{}", user.shell));
        if number_of(&self.group, name).is_none() {
            append(&mut self.group, &format!("{name}:x:{number}:"));
            if let Some(gshadow) = &mut self.gshadow {
                append(gshadow, &format!("{name}:!::"));
            }
        }
        if let Some(shadow) = &mut self.shadow {
            // No password opens it, and none is old.
            append(shadow, &format!("{name}:!::0:99999:7:::"));
        }
        Ok(home.into())
    }

    fn free_number(&self) -> u32 {
        let taken = |number: u32| {
            [&self.passwd, &self.group].iter().any(|text| {
                text.lines().any(|line| line.split(':').nth(2) == Some(number.to_string().as_str()))
            })
        };
        (FIRST_USER..).find(|&number| !taken(number)).expect("some number is free")
    }

    fn ids(&self, owner: &Owner) -> Result<Ids> {
        let unknown = |kind: &str, name: &str| Error::InvalidRecipe {
            problems: vec![format!(
                "owner: there is no {kind} `{name}` in the template; add it to users"
            )],
        };
        Ok(Ids {
            user: number_of(&self.passwd, &owner.user)
                .ok_or_else(|| unknown("user", &owner.user))?,
            group: number_of(&self.group, &owner.group)
                .ok_or_else(|| unknown("group", &owner.group))?,
        })
    }
}

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";
const SHADOW: &str = "/etc/shadow";
const GSHADOW: &str = "/etc/gshadow";

fn number_of(text: &str, name: &str) -> Option<u32> {
    let line = text.lines().find(|line| line.split(':').next() == Some(name))?;
    line.split(':').nth(2)?.parse().ok()
}

fn append(text: &mut String, line: &str) {
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(line);
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt};

    use super::*;
    use crate::recipe::Recipe;

    fn tree(directory: &Path) -> Tree {
        for (path, content) in [
            (PASSWD, "root:x:0:0:root:/root:/bin/bash\ntaken:x:1000:1000::/:/bin/sh"),
            (GROUP, "root:x:0:\ntaken:x:1000:\nusers:x:100:\n"),
            (SHADOW, "root:*:1:0:99999:7:::\n"),
            ("/etc/skel/.bashrc", "# rc\n"),
        ] {
            let path = directory.join(&path[1..]);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        Tree::open(directory).unwrap()
    }

    #[test]
    fn a_recipe_is_applied_as_written() {
        let directory = tempfile::tempdir().unwrap();
        let tree = tree(directory.path());
        let text = r#"
            users = [{ name = "panda" }]
            directories = [{ path = "/home/panda", mode = "0777", owner = "panda" }, { path = "/work", mode = "1777" }]
            links = [{ path = "/a/link", target = "/etc/passwd" }]
            files = [{ path = "/opt/x/run", content = "echo", mode = "0750", owner = "panda:users" }]
        "#;
        let recipe = Recipe::parse(text).unwrap();
        apply(&tree, &recipe.tree).unwrap();
        apply(&tree, &recipe.tree).unwrap();
        let stat = |path: &str| directory.path().join(path).symlink_metadata().unwrap();
        let (home, work, file) = (stat("home/panda"), stat("work"), stat("opt/x/run"));
        assert_eq!((home.mode() & 0o7777, home.uid(), home.gid()), (0o777, 1001, 1001));
        assert_eq!((work.mode() & 0o7777, work.uid()), (0o1777, 0));
        assert_eq!((file.mode() & 0o7777, file.uid(), file.gid()), (0o750, 1001, 100));
        assert_eq!(
            fs::read_link(directory.path().join("a/link")).unwrap(),
            Path::new("/etc/passwd")
        );
        assert_eq!(stat("home/panda/.bashrc").uid(), 1001);
        let passwd = fs::read_to_string(directory.path().join("etc/passwd")).unwrap();
        assert_eq!(passwd.matches("panda:x:1001:1001::/home/panda:/bin/bash\n").count(), 1);
    }

    #[test]
    fn an_owner_that_nobody_made_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let recipe = Recipe::parse("directories = [{ path = \"/x\", owner = \"ghost\" }]").unwrap();
        let result = apply(&tree(directory.path()), &recipe.tree);
        assert!(
            matches!(result, Err(Error::InvalidRecipe { problems }) if problems[0].contains("ghost"))
        );
    }

    #[test]
    fn only_milestones_are_told() {
        let mut milestones = Milestones::default();
        assert_eq!(
            milestones.hear("I: running apt-get update..."),
            Some("running apt-get update...".to_owned())
        );
        assert_eq!(milestones.hear("I: running --setup-hook in shell: …"), None);
        assert_eq!(milestones.hear("Unpacking x"), None);
        assert_eq!(
            milestones.hear("E: Unable to locate package nope"),
            Some("E: Unable to locate package nope".to_owned())
        );
        assert_eq!(milestones.unknown, ["nope"]);
    }
}
