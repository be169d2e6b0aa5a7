//! `atoll template`: what sandboxes start from.

use std::{ffi::OsStr, path::PathBuf};

use anyhow::Context;
use api::{Build, BuildStatus, Template, TemplateName};
use clap::{Args, Subcommand};
use client::{BuildSource, Client};

use crate::{
    Connection,
    failure::Failure,
    output::{Output, instant, mebibytes, optional_instant, properties, remark, table},
};

/// List, build and delete templates: what sandboxes start from
#[derive(Subcommand)]
pub(crate) enum TemplateCommand {
    /// List the templates: the built-in ones and your own
    List,
    /// Show one template
    Get {
        name: TemplateName,
    },
    Build(BuildTemplate),
    /// Delete a template of your own; sandboxes made from it go on
    Delete {
        name: TemplateName,
    },
    /// List the builds, newest first
    Builds,
    /// Print the log of a build, and follow it while it runs
    Logs {
        build: String,
    },
}

/// Build a template from a recipe or from a root file system
///
/// A recipe is a file that ends in `.toml`: packages, users, files, on top of another template. Anything else is taken
/// for a root file system as a tar, compressed or not. The log goes to standard error.
#[derive(Args)]
#[command(after_help = "\
Examples:
  atoll template build notes notes.toml
  docker export CONTAINER | zstd > rootfs.tar.zst; atoll template build mine rootfs.tar.zst")]
pub(crate) struct BuildTemplate {
    /// The template's name; one of yours that has it is replaced
    name: TemplateName,
    #[arg(value_name = "RECIPE_OR_TAR")]
    source: PathBuf,
    /// Print the build's id and leave; `atoll template logs` follows it
    #[arg(long)]
    detach: bool,
}

impl TemplateCommand {
    pub(crate) async fn run(self, connection: &Connection) -> anyhow::Result<()> {
        let (client, output) = (connection.client()?, connection.output());
        match self {
            Self::List => output.show(&client.templates().await?, |templates| listed(templates))?,
            Self::Get { name } => output.show(&client.template(&name).await?, described)?,
            Self::Build(build) => build.run(&client, output).await?,
            Self::Delete { name } => client.delete_template(&name).await?,
            Self::Builds => output.show(&client.builds().await?, |builds| builds_listed(builds))?,
            Self::Logs { build } => {
                let mut lines = client.build_log(&build).await?;
                while let Some(line) = lines.next().await? {
                    crate::output::line(&line)?;
                }
            }
        }
        Ok(())
    }
}

impl BuildTemplate {
    async fn run(self, client: &Client, output: Output) -> anyhow::Result<()> {
        let build = client.build_template(&self.name, self.read_source().await?).await?;
        if self.detach {
            return Ok(output.show(&build, |build| build.id.clone())?);
        }
        let mut lines = client.build_log(&build.id).await?;
        while let Some(line) = lines.next().await? {
            remark(line);
        }
        let ended = client.build(&build.id).await?;
        match ended.status {
            BuildStatus::Done => Ok(output.show(&ended, |build| build.name.to_string())?),
            BuildStatus::Failed => {
                let reason = ended.error.unwrap_or_else(|| "its log has the reason".to_owned());
                Err(Failure::new(format!("the build of {} failed: {reason}", self.name)).into())
            }
            BuildStatus::Queued | BuildStatus::Running | BuildStatus::Baking => {
                Err(Failure::new(format!("the log of build {} ended before the build", ended.id))
                    .hint(format!("it may go on; see: atoll template logs {}", ended.id))
                    .into())
            }
        }
    }

    async fn read_source(&self) -> anyhow::Result<BuildSource> {
        let shown = self.source.display();
        if self.source.extension() == Some(OsStr::new("toml")) {
            let recipe = tokio::fs::read_to_string(&self.source)
                .await
                .with_context(|| format!("read {shown}"))?;
            return Ok(BuildSource::Recipe(recipe));
        }
        let file =
            tokio::fs::File::open(&self.source).await.with_context(|| format!("read {shown}"))?;
        let metadata = file.metadata().await.with_context(|| format!("read {shown}"))?;
        if metadata.is_dir() {
            return Err(Failure::new(format!("{shown} is a directory"))
                .hint(format!("pack it first: tar -C {shown} --numeric-owner -cf rootfs.tar ."))
                .into());
        }
        Ok(BuildSource::Tar(client::body_of(file)))
    }
}

fn listed(templates: &[Template]) -> String {
    let row = |template: &Template| {
        [
            template.name.to_string(),
            aliases(template),
            template.cpu.to_string(),
            mebibytes(template.memory_mb),
            mebibytes(template.disk_mb),
            size(template),
            template.description.clone(),
        ]
    };
    table(
        ["name", "aliases", ">cpu", ">memory", ">disk", ">size", "description"],
        templates.iter().map(row),
    )
}

fn described(template: &Template) -> String {
    properties(&[
        ("name", template.name.to_string()),
        ("aliases", aliases(template)),
        ("description", template.description.clone()),
        ("cpu", template.cpu.to_string()),
        ("memory", mebibytes(template.memory_mb)),
        ("disk", mebibytes(template.disk_mb)),
        ("size", size(template)),
        ("owner", if template.is_global { "built in" } else { "you" }.to_owned()),
        ("digest", template.digest.clone()),
        ("built", optional_instant(template.created_at, "not yet")),
    ])
}

/// A template that nobody has used yet may not be built.
fn size(template: &Template) -> String {
    if template.size_bytes == 0 {
        "-".to_owned()
    } else {
        mebibytes(template.size_bytes.div_ceil(1 << 20))
    }
}

fn aliases(template: &Template) -> String {
    template.aliases.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn builds_listed(builds: &[Build]) -> String {
    let row = |build: &Build| {
        let status = match build.status {
            BuildStatus::Queued => "queued",
            BuildStatus::Running => "running",
            BuildStatus::Baking => "baking",
            BuildStatus::Done => "done",
            BuildStatus::Failed => "failed",
        };
        let error = build.error.clone().unwrap_or_default();
        [
            build.id.clone(),
            build.name.to_string(),
            status.to_owned(),
            instant(build.created_at),
            error,
        ]
    };
    table(["id", "template", "status", "created", "error"], builds.iter().map(row))
}
