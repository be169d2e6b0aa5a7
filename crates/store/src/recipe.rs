//! Recipes: what a template is made of, in TOML. Declarative only: packages of Debian, users, directories, links and
//! files. Everything is checked here, once, and every problem is named.

use std::{collections::BTreeSet, path::Path};

use api::TemplateName;
use serde::{Deserialize, Serialize};

use crate::{Digest, Error, Result, digest::Hasher};

/// Counts up when the same recipe would give another tree, so that cached templates are built again.
const BUILDER_VERSION: u32 = 1;

const DEFAULT_SUITE: &str = "trixie";
const DEFAULT_CPU: u32 = 2;
const DEFAULT_MEMORY_MB: u64 = 2048;
const DEFAULT_DISK_MB: u64 = 10_240;
const MOST_PACKAGES: usize = 1000;
const MOST_LAYERS: usize = 8;
const MOST_WARM_UPS: usize = 16;
const LONGEST_CONTENT: usize = 1 << 20;

/// As written, and known to be valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    pub label: String,
    pub description: String,
    /// Other names of the template.
    pub aliases: Vec<TemplateName>,
    /// The template whose tree this one starts from.
    pub from: Option<TemplateName>,
    /// Of Debian. Only for a recipe without `from`.
    pub suite: Option<String>,
    /// Default size of the sandboxes, where neither this recipe nor the one it starts from says otherwise: 2 vCPUs,
    /// 2048 MiB of memory, 10 GiB of disk.
    pub cpu: Option<u32>,
    pub memory_mb: Option<u64>,
    pub disk_mb: Option<u64>,
    /// Commands that run once in the guest before it is baked, after those of the template it starts from: what they
    /// read is in every sandbox's page cache.
    pub warm_up: Vec<String>,
    pub tree: TreeChanges,
}

/// What a recipe adds to a tree, in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct TreeChanges {
    pub packages: Vec<String>,
    pub users: Vec<User>,
    pub directories: Vec<Directory>,
    pub links: Vec<Link>,
    pub files: Vec<FileContent>,
}

/// The form on disk. Flat, because refusing unknown fields and flattening do not go together.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
#[derive(Default)]
struct Text {
    label: String,
    description: String,
    aliases: Vec<TemplateName>,
    from: Option<TemplateName>,
    suite: Option<String>,
    cpu: Option<u32>,
    memory_mb: Option<u64>,
    disk_mb: Option<u64>,
    warm_up: Vec<String>,
    packages: Vec<String>,
    users: Vec<User>,
    directories: Vec<Directory>,
    links: Vec<Link>,
    files: Vec<FileContent>,
}

impl From<Text> for Recipe {
    fn from(text: Text) -> Self {
        let Text { label, description, aliases, from, suite, cpu, memory_mb, disk_mb, .. } = text;
        let Text { packages, users, directories, links, files, warm_up, .. } = text;
        let tree = TreeChanges { packages, users, directories, links, files };
        Self { label, description, aliases, from, suite, cpu, memory_mb, disk_mb, warm_up, tree }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct User {
    pub name: String,
    /// Default `/home/NAME`.
    pub home: Option<String>,
    #[serde(default = "default_shell")]
    pub shell: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Directory {
    pub path: String,
    #[serde(default = "directory_mode")]
    pub mode: Mode,
    #[serde(default = "root")]
    pub owner: Owner,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    pub path: String,
    pub target: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileContent {
    pub path: String,
    pub content: String,
    #[serde(default = "file_mode")]
    pub mode: Mode,
    #[serde(default = "root")]
    pub owner: Owner,
}

/// Octal text, as `chmod` takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Mode(u32);

impl Mode {
    pub fn bits(self) -> u32 {
        self.0
    }
}

impl TryFrom<String> for Mode {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let octal = (3..=4).contains(&text.len()) && text.bytes().all(|b| matches!(b, b'0'..=b'7'));
        match u32::from_str_radix(&text, 8) {
            Ok(bits) if octal => Ok(Self(bits)),
            Ok(_) | Err(_) => {
                Err(format!("mode `{text}` must be three or four octal digits, as in \"0755\""))
            }
        }
    }
}

impl From<Mode> for String {
    fn from(mode: Mode) -> Self {
        format!("{:04o}", mode.0)
    }
}

/// `user` or `user:group`, by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Owner {
    pub user: String,
    pub group: String,
}

impl TryFrom<String> for Owner {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let (user, group) = text.split_once(':').unwrap_or((&text, &text));
        if is_user_name(user) && is_user_name(group) {
            Ok(Self { user: user.to_owned(), group: group.to_owned() })
        } else {
            Err(format!("owner `{text}` must be the name of a user, or `user:group`"))
        }
    }
}

impl From<Owner> for String {
    fn from(owner: Owner) -> Self {
        format!("{}:{}", owner.user, owner.group)
    }
}

fn root() -> Owner {
    Owner { user: "root".to_owned(), group: "root".to_owned() }
}

fn default_shell() -> String {
    "/bin/bash".to_owned()
}

fn directory_mode() -> Mode {
    Mode(0o755)
}

fn file_mode() -> Mode {
    Mode(0o644)
}

impl Recipe {
    pub fn parse(text: &str) -> Result<Self> {
        let recipe: Self = toml::from_str::<Text>(text)
            .map_err(|error| Error::InvalidRecipe {
                problems: vec![error.to_string().trim_end().to_owned()],
            })?
            .into();
        let problems = recipe.problems();
        if problems.is_empty() { Ok(recipe) } else { Err(Error::InvalidRecipe { problems }) }
    }

    fn problems(&self) -> Vec<String> {
        let mut problems = Problems::default();
        problems.expect(self.label.len() <= 100, || "label must be at most 100 bytes".to_owned());
        problems.expect(self.description.len() <= 2000, || {
            "description must be at most 2000 bytes".to_owned()
        });
        if let Some(suite) = &self.suite {
            problems.expect(is_suite(suite), || {
                format!("suite `{suite}` must be the name of a Debian release, as in \"{DEFAULT_SUITE}\"")
            });
            problems.expect(self.from.is_none(), || {
                "suite cannot be combined with from: the suite of that template is used; leave one out".to_owned()
            });
        }
        problems.range("cpu", self.cpu.map(u64::from), 1, 64);
        problems.range("memory_mb", self.memory_mb, 128, 1 << 20);
        problems.range("disk_mb", self.disk_mb, 128, 1 << 24);
        problems.expect(self.warm_up.len() <= MOST_WARM_UPS, || {
            format!("warm_up must name at most {MOST_WARM_UPS} commands")
        });
        problems.expect(
            self.warm_up.iter().all(|command| !command.is_empty() && !command.contains('\0')),
            || "warm_up: a command must not be empty nor hold NUL".to_owned(),
        );
        self.tree.problems(&mut problems);
        problems.0
    }

    /// Finds all recipes that this one builds on, through `find`, by name or alias.
    pub fn resolve(&self, find: &dyn Fn(&TemplateName) -> Option<Self>) -> Result<ResolvedRecipe> {
        let invalid = |problem: String| Error::InvalidRecipe { problems: vec![problem] };
        let mut newest_first = vec![self.clone()];
        while let Some(name) = newest_first.last().and_then(|recipe| recipe.from.clone()) {
            if newest_first.len() == MOST_LAYERS {
                return Err(invalid(format!(
                    "from leads over more than {MOST_LAYERS} templates or in a circle; start from one nearer to the base"
                )));
            }
            newest_first.push(find(&name).ok_or_else(|| {
                invalid(format!("from = \"{name}\": no recipe of that name is known; name a template built from a recipe"))
            })?);
        }
        let suite = newest_first.last().and_then(|recipe| recipe.suite.clone());
        let mut resolved = ResolvedRecipe {
            suite: suite.unwrap_or_else(|| DEFAULT_SUITE.to_owned()),
            layers: Vec::new(),
        };
        let (mut cpu, mut memory_mb, mut disk_mb) =
            (DEFAULT_CPU, DEFAULT_MEMORY_MB, DEFAULT_DISK_MB);
        for recipe in newest_first.into_iter().rev() {
            cpu = recipe.cpu.unwrap_or(cpu);
            memory_mb = recipe.memory_mb.unwrap_or(memory_mb);
            disk_mb = recipe.disk_mb.unwrap_or(disk_mb);
            resolved.layers.push(Layer {
                cpu,
                memory_mb,
                disk_mb,
                warm_up: recipe.warm_up,
                tree: recipe.tree,
            });
        }
        Ok(resolved)
    }
}

/// A recipe together with all that it builds on.
#[derive(Debug, Clone)]
pub struct ResolvedRecipe {
    suite: String,
    /// Base first, never empty.
    layers: Vec<Layer>,
}

#[derive(Debug, Clone)]
struct Layer {
    cpu: u32,
    memory_mb: u64,
    disk_mb: u64,
    warm_up: Vec<String>,
    tree: TreeChanges,
}

impl ResolvedRecipe {
    fn newest(&self) -> &Layer {
        self.layers.last().expect("there is at least the recipe itself")
    }

    pub fn suite(&self) -> &str {
        &self.suite
    }

    pub fn cpu(&self) -> u32 {
        self.newest().cpu
    }

    pub fn memory_mb(&self) -> u64 {
        self.newest().memory_mb
    }

    pub fn disk_mb(&self) -> u64 {
        self.newest().disk_mb
    }

    /// Of all layers, base first.
    pub fn warm_up(&self) -> Vec<String> {
        self.layers.iter().flat_map(|layer| layer.warm_up.clone()).collect()
    }

    /// What the recipe itself adds to the tree of [`ResolvedRecipe::parent`].
    pub(crate) fn tree(&self) -> &TreeChanges {
        &self.newest().tree
    }

    pub(crate) fn parent(&self) -> Option<Self> {
        let (_, parents) = self.layers.split_last()?;
        (!parents.is_empty()).then(|| Self { suite: self.suite.clone(), layers: parents.to_vec() })
    }

    /// Of everything that goes into the template; not of what it is called.
    pub fn digest(&self) -> Digest {
        let mut hasher = Hasher::default()
            .part(&BUILDER_VERSION.to_le_bytes())
            .part(self.suite.as_bytes())
            .part(&self.cpu().to_le_bytes())
            .part(&self.memory_mb().to_le_bytes())
            .part(&self.disk_mb().to_le_bytes());
        for layer in &self.layers {
            let tree = serde_json::to_vec(&layer.tree).expect("a recipe is plain data");
            hasher = hasher.part(&tree);
            for command in &layer.warm_up {
                hasher = hasher.part(command.as_bytes());
            }
        }
        hasher.finish()
    }
}

/// The templates that come with Atoll, in an order in which each finds what it builds on before it.
pub fn builtin() -> Vec<(TemplateName, Recipe)> {
    [
        ("base", include_str!("../../../templates/base.toml")),
        ("code-interpreter", include_str!("../../../templates/code-interpreter.toml")),
        ("postgres", include_str!("../../../templates/postgres.toml")),
    ]
    .into_iter()
    .map(|(name, text)| {
        let recipe = Recipe::parse(text).expect("a test parses the recipes that come with Atoll");
        (name.parse().expect("their names are plain"), recipe)
    })
    .collect()
}

/// By name or alias.
pub fn find_builtin(name: &TemplateName) -> Option<Recipe> {
    builtin()
        .into_iter()
        .find(|(n, recipe)| n == name || recipe.aliases.contains(name))
        .map(|(_, recipe)| recipe)
}

#[derive(Default)]
struct Problems(Vec<String>);

impl Problems {
    fn expect(&mut self, holds: bool, problem: impl FnOnce() -> String) {
        if !holds {
            self.0.push(problem());
        }
    }

    fn range(&mut self, name: &str, value: Option<u64>, least: u64, most: u64) {
        if let Some(value) = value {
            self.expect((least..=most).contains(&value), || {
                format!("{name} is {value} and must be from {least} to {most}")
            });
        }
    }

    fn path(&mut self, field: &str, path: &str) {
        self.expect(is_clean_path(path), || {
            format!("{field} `{path}` must be absolute, below `/`, and without `.`, `..`, double or trailing slashes")
        });
    }
}

impl TreeChanges {
    fn problems(&self, problems: &mut Problems) {
        problems.expect(self.packages.len() <= MOST_PACKAGES, || {
            format!(
                "packages has {} entries; at most {MOST_PACKAGES} are taken",
                self.packages.len()
            )
        });
        for package in &self.packages {
            problems.expect(is_package(package), || {
                format!("packages: `{package}` is not the name of a Debian package (no versions, no options)")
            });
        }
        for User { name, home, shell } in &self.users {
            problems.expect(is_user_name(name) && name != "root", || {
                format!("users: `{name}` must be 1 to 32 small letters, digits, `-` or `_`, beginning with a letter, and not root")
            });
            if let Some(home) = home {
                problems.path("users: home", home);
                problems.expect(!home.contains(':'), || {
                    format!("users: home `{home}` must not hold a colon")
                });
            }
            problems.path("users: shell", shell);
            problems.expect(!shell.contains(':'), || {
                format!("users: shell `{shell}` must not hold a colon")
            });
        }
        for directory in &self.directories {
            problems.path("directories: path", &directory.path);
        }
        for link in &self.links {
            problems.path("links: path", &link.path);
            problems.expect(
                !link.target.is_empty() && link.target.len() < 4096 && !link.target.contains('\0'),
                || format!("links: the target of `{}` must be 1 to 4095 bytes", link.path),
            );
        }
        for file in &self.files {
            problems.path("files: path", &file.path);
            problems.expect(file.content.len() <= LONGEST_CONTENT, || {
                format!(
                    "files: the content of `{}` must be at most {LONGEST_CONTENT} bytes",
                    file.path
                )
            });
        }
        let mut seen = BTreeSet::new();
        let paths = (self.directories.iter().map(|d| &d.path))
            .chain(self.links.iter().map(|l| &l.path))
            .chain(self.files.iter().map(|f| &f.path));
        for path in paths {
            problems
                .expect(seen.insert(path), || format!("`{path}` is there twice; leave one out"));
        }
    }
}

fn is_suite(text: &str) -> bool {
    (1..=40).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

/// As Debian's policy has it; nothing that apt takes for an option, a pattern or a file passes.
fn is_package(text: &str) -> bool {
    (2..=100).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        // apt takes a trailing `-` or `+` for "remove" or "install".
        && !text.ends_with('-')
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'+' | b'-' | b'.'))
}

fn is_user_name(text: &str) -> bool {
    (1..=32).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'_'))
}

fn is_clean_path(text: &str) -> bool {
    text.len() < 4096
        && !text.bytes().any(|b| b < b' ')
        && text.strip_prefix('/').is_some_and(|rest| {
            rest.split('/').all(|part| !matches!(part, "" | "." | "..") && part.len() <= 255)
        })
        && Path::new(text).is_absolute()
}

#[cfg(test)]
mod tests;
