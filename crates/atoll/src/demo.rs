//! `atoll demo`: the everyday job from start to end, with what each step takes.

use std::{
    future::Future,
    path::PathBuf,
    pin::{Pin, pin},
    time::{Duration, Instant},
};

use anyhow::Context;
use api::{CreateSandbox, ExecRequest, Sandbox};
use clap::Args;
use client::{Client, WriteOptions};
use serde::Serialize;
use tokio::sync::oneshot;

use crate::{
    Connection,
    failure::Failure,
    interrupt,
    logging::{self, LogFormat},
    output::{Output, remark},
    prepare, serve,
    settings::{Settings, require_root},
};

const CSV: &str = "\
month,region,revenue
2026-01,north,120
2026-01,south,80
2026-02,north,135
2026-02,south,97
2026-03,north,128
2026-03,south,131
2026-04,north,160
2026-04,south,149
";

const SCRIPT: &str = r#"
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

sales = pd.read_csv("/home/panda/sales.csv")
totals = sales.pivot(index="month", columns="region", values="revenue")
totals.plot.bar(rot=0, title="Revenue by region")
plt.savefig("/home/panda/chart.png", dpi=120, bbox_inches="tight")
print(f"total revenue: {sales['revenue'].sum()}")
"#;

/// Create a sandbox, turn a CSV into a chart in it, and delete it (as root)
///
/// Starts a server of its own on a free port and a fresh data directory, and leaves nothing behind but the chart. With
/// --with-server it uses the one that --url names.
#[derive(Args)]
pub(crate) struct Demo {
    /// Where the chart goes
    #[arg(long, value_name = "FILE", default_value = "atoll-chart.png")]
    output: PathBuf,
    /// Use the server at --url with --key instead of starting one
    #[arg(long)]
    with_server: bool,
    #[command(flatten)]
    settings: Settings,
}

#[derive(Serialize)]
struct Report {
    chart: PathBuf,
    steps: Vec<Step>,
}

#[derive(Serialize)]
struct Step {
    name: String,
    milliseconds: f64,
}

impl Demo {
    pub(crate) async fn run(self, connection: &Connection) -> anyhow::Result<()> {
        // From here on an interrupt ends the work, not the program: there is a sandbox and a directory to remove.
        let stop = pin!(interrupt::requested()?);
        if self.with_server {
            return self.job(&connection.client()?, connection.output(), stop).await;
        }
        require_root("demo")?;
        logging::start(LogFormat::Text, "error");
        self.with_own_server(connection.output(), stop).await
    }

    async fn with_own_server(
        &self,
        output: Output,
        mut stop: Pin<&mut impl Future<Output = ()>>,
    ) -> anyhow::Result<()> {
        let (config, data_dir) = self.settings.scratch_config()?;
        let mut progress = prepare::progress();
        server::prepare(&config, &mut progress, stop.as_mut()).await?;
        let (tell, told) = oneshot::channel();
        let (end, ended) = oneshot::channel::<()>();
        let ready = move |address, key: Option<String>| {
            // Nobody listens only when the demo has ended already.
            let _ = tell.send((address, key));
        };
        let mut server = pin!(server::run(config, ready, async move {
            // Dropping the other end is a request to end as well.
            let _ = ended.await;
        }));
        let job = async move {
            let Ok((address, key)) = told.await else { return Ok(()) };
            let outcome = match Client::new(&serve::url_of(address), key.as_deref()) {
                Ok(client) => self.job(&client, output, stop).await,
                Err(error) => Err(error.into()),
            };
            drop(end);
            outcome
        };
        let mut job = pin!(job);
        let outcome = tokio::select! {
            stopped = &mut server => {
                stopped?;
                return Err(Failure::new("the server ended before the demo").into());
            }
            outcome = &mut job => outcome,
        };
        server.await?;
        data_dir.close().context("remove the data directory")?;
        outcome
    }

    async fn job(
        &self,
        client: &Client,
        output: Output,
        stop: impl Future<Output = ()>,
    ) -> anyhow::Result<()> {
        let mut steps = Vec::new();
        let request = CreateSandbox {
            template: Some("code-interpreter".to_owned()),
            ttl_seconds: Some(600),
            metadata: Some([("made-by".to_owned(), "atoll demo".to_owned())].into()),
            ..CreateSandbox::default()
        };
        let sandbox = step(
            &mut steps,
            "create a sandbox from code-interpreter",
            client.create_sandbox(&request),
        )
        .await?;
        let drawn = interrupt::unless(stop, self.draw(client, &sandbox, &mut steps)).await;
        let deleted =
            step(&mut steps, "delete the sandbox", client.delete_sandbox(&sandbox.id)).await;
        let chart = drawn?;
        deleted?;
        Ok(output.show(&Report { chart, steps }, |report| report.chart.display().to_string())?)
    }

    async fn draw(
        &self,
        client: &Client,
        sandbox: &Sandbox,
        steps: &mut Vec<Step>,
    ) -> anyhow::Result<PathBuf> {
        let id = &sandbox.id;
        let options = WriteOptions { size: Some(CSV.len() as u64), ..WriteOptions::default() };
        step(
            steps,
            "upload sales.csv",
            client.write_file(id, "/home/panda/sales.csv", CSV, &options),
        )
        .await?;
        let request = ExecRequest {
            cmd: "python3 -".to_owned(),
            stdin: Some(SCRIPT.to_owned()),
            timeout_seconds: Some(300.0),
            ..ExecRequest::default()
        };
        let result =
            step(steps, "draw a chart with pandas and matplotlib", client.exec(id, &request))
                .await?;
        if result.exit_code != 0 {
            return Err(Failure::new(format!(
                "the script ended with {}: {}",
                result.exit_code,
                result.stderr.trim()
            ))
            .into());
        }
        let read = async { client.read_file(id, "/home/panda/chart.png").await?.bytes().await };
        let png = step(steps, "download chart.png", read).await?;
        std::fs::write(&self.output, png)
            .with_context(|| format!("write {}", self.output.display()))?;
        std::path::absolute(&self.output).context("find the current directory")
    }
}

/// Does one step and shows what it took.
async fn step<T, E>(
    steps: &mut Vec<Step>,
    name: &str,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let start = Instant::now();
    let outcome = work.await;
    let taken: Duration = start.elapsed();
    if outcome.is_ok() {
        let milliseconds = taken.as_secs_f64() * 1000.0;
        remark(format_args!("  {name:42} {milliseconds:8.1} ms"));
        steps.push(Step { name: name.to_owned(), milliseconds });
    }
    outcome
}
