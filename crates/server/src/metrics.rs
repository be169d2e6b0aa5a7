//! What the server counts, for Prometheus. Labels come from small fixed sets: never an id, a path or a key.

use std::{collections::BTreeMap, time::Duration};

use machine::network::Traffic;
use prometheus::{
    Encoder, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, TextEncoder,
};

/// Seconds. Answers come within milliseconds, creates and commands within seconds.
const BUCKETS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

pub struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    latencies: HistogramVec,
    pub(crate) requests_under_way: IntGauge,
    sandboxes: IntGaugeVec,
    machines_ready: IntGauge,
    /// From the request until the guest had answered.
    pub(crate) creates: Histogram,
    execs: IntCounterVec,
    pub(crate) file_bytes_read: IntCounter,
    pub(crate) file_bytes_written: IntCounter,
    network_bytes_sent: IntCounter,
    network_bytes_received: IntCounter,
}

/// What is not counted as it happens, but looked at when someone asks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    pub(crate) help: &'static str,
    pub(crate) value: u64,
}

/// What is looked at for one answer.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    pub(crate) sandboxes: BTreeMap<&'static str, usize>,
    pub(crate) machines_ready: usize,
    pub(crate) refused_creates: BTreeMap<&'static str, u64>,
    pub(crate) capacity: Vec<Figure>,
    pub(crate) traffic: Traffic,
    pub(crate) databases: BTreeMap<&'static str, usize>,
}

/// How a command ended.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ExecEnd {
    Succeeded,
    Failed,
    TimedOut,
    /// The server does not know.
    Lost,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All at zero.
    pub fn new() -> Self {
        Self::registered().expect("the names are valid and different")
    }

    fn registered() -> Result<Self, prometheus::Error> {
        let registry = new_registry()?;
        let latency =
            |name: &str, help: &str| HistogramOpts::new(name, help).buckets(BUCKETS.to_vec());
        let metrics = Self {
            requests: IntCounterVec::new(
                Opts::new("http_requests_total", "Requests answered."),
                &["method", "route", "status"],
            )?,
            latencies: HistogramVec::new(
                latency("http_request_seconds", "From a request until the head of its answer."),
                &["method", "route"],
            )?,
            requests_under_way: IntGauge::new(
                "http_requests_under_way",
                "Requests without an answer yet.",
            )?,
            sandboxes: IntGaugeVec::new(Opts::new("sandboxes", "Sandboxes by state."), &["state"])?,
            machines_ready: IntGauge::new(
                "machines_ready",
                "Machines prepared for the next creates.",
            )?,
            creates: Histogram::with_opts(latency(
                "sandbox_create_seconds",
                "From a create until its guest had answered.",
            ))?,
            execs: IntCounterVec::new(
                Opts::new("execs_total", "Commands by how they ended."),
                &["end"],
            )?,
            file_bytes_read: IntCounter::new(
                "file_bytes_read_total",
                "Bytes of files that left sandboxes.",
            )?,
            file_bytes_written: IntCounter::new(
                "file_bytes_written_total",
                "Bytes of files written into sandboxes.",
            )?,
            network_bytes_sent: IntCounter::new(
                "network_bytes_sent_total",
                "Bytes sent by sandboxes over their networks.",
            )?,
            network_bytes_received: IntCounter::new(
                "network_bytes_received_total",
                "Bytes received by sandboxes over their networks.",
            )?,
            registry,
        };
        let registry = &metrics.registry;
        registry.register(Box::new(metrics.requests.clone()))?;
        registry.register(Box::new(metrics.latencies.clone()))?;
        registry.register(Box::new(metrics.requests_under_way.clone()))?;
        registry.register(Box::new(metrics.sandboxes.clone()))?;
        registry.register(Box::new(metrics.machines_ready.clone()))?;
        registry.register(Box::new(metrics.creates.clone()))?;
        registry.register(Box::new(metrics.execs.clone()))?;
        registry.register(Box::new(metrics.file_bytes_read.clone()))?;
        registry.register(Box::new(metrics.file_bytes_written.clone()))?;
        registry.register(Box::new(metrics.network_bytes_sent.clone()))?;
        registry.register(Box::new(metrics.network_bytes_received.clone()))?;
        Ok(metrics)
    }

    /// `route` is the template, with `{id}` in it.
    pub(crate) fn answered(&self, method: &str, route: &str, status: u16, took: Duration) {
        let mut digits = [0; 3];
        for (digit, value) in digits.iter_mut().zip([status / 100, status / 10, status]) {
            *digit = b'0' + (value % 10) as u8;
        }
        let status = std::str::from_utf8(&digits).unwrap_or("000");
        self.requests.with_label_values(&[method, route, status]).inc();
        self.latencies.with_label_values(&[method, route]).observe(took.as_secs_f64());
    }

    pub(crate) fn exec_ended(&self, end: ExecEnd) {
        let label = match end {
            ExecEnd::Succeeded => "succeeded",
            ExecEnd::Failed => "failed",
            ExecEnd::TimedOut => "timed_out",
            ExecEnd::Lost => "lost",
        };
        self.execs.with_label_values(&[label]).inc();
    }

    /// Everything in Prometheus's text format.
    pub(crate) fn text(&self, figures: &Figures) -> String {
        for (counter, bytes) in [
            (&self.network_bytes_sent, figures.traffic.sent_bytes),
            (&self.network_bytes_received, figures.traffic.received_bytes),
        ] {
            counter.inc_by(bytes.saturating_sub(counter.get()));
        }
        self.sandboxes.reset();
        for (state, count) in &figures.sandboxes {
            self.sandboxes
                .with_label_values(&[state])
                .set(i64::try_from(*count).unwrap_or(i64::MAX));
        }
        self.machines_ready.set(i64::try_from(figures.machines_ready).unwrap_or(i64::MAX));
        let mut families = self.registry.gather();
        match looked_at(figures) {
            Ok(registry) => families.extend(registry.gather()),
            Err(error) => tracing::warn!(%error, "figures cannot be told"),
        }
        let mut text = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&families, &mut text) {
            tracing::warn!(%error, "metrics cannot be written");
        }
        String::from_utf8(text).unwrap_or_default()
    }
}

fn looked_at(figures: &Figures) -> Result<Registry, prometheus::Error> {
    let registry = new_registry()?;
    for figure in &figures.capacity {
        let gauge = IntGauge::new(figure.name, figure.help)?;
        gauge.set(i64::try_from(figure.value).unwrap_or(i64::MAX));
        registry.register(Box::new(gauge))?;
    }
    let help = "Creates refused, by what was short on the host.";
    let refused = IntCounterVec::new(Opts::new("creates_refused_total", help), &["short"])?;
    for (short, count) in &figures.refused_creates {
        refused.with_label_values(&[short]).inc_by(*count);
    }
    registry.register(Box::new(refused))?;
    let databases = IntGaugeVec::new(Opts::new("databases", "Databases by status."), &["status"])?;
    for (status, count) in &figures.databases {
        databases.with_label_values(&[status]).set(i64::try_from(*count).unwrap_or(i64::MAX));
    }
    registry.register(Box::new(databases))?;
    Ok(registry)
}

fn new_registry() -> Result<Registry, prometheus::Error> {
    Registry::new_custom(Some("atoll".to_owned()), None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_counted_is_told() {
        let metrics = Metrics::default();
        metrics.answered("GET", "/v1/sandboxes/{id}", 404, Duration::from_millis(2));
        metrics.exec_ended(ExecEnd::TimedOut);
        let free = Figure { name: "disk_free_bytes", help: "Free room.", value: 5 };
        let text = metrics.text(&Figures {
            sandboxes: BTreeMap::from([("running", 3)]),
            machines_ready: 2,
            refused_creates: BTreeMap::from([("memory", 4)]),
            capacity: vec![free],
            traffic: Traffic { sent_bytes: 5, received_bytes: 6 },
            databases: BTreeMap::from([("hibernated", 7)]),
        });
        for line in [
            r#"atoll_http_requests_total{method="GET",route="/v1/sandboxes/{id}",status="404"} 1"#,
            r#"atoll_execs_total{end="timed_out"} 1"#,
            r#"atoll_sandboxes{state="running"} 3"#,
            "atoll_machines_ready 2",
            r#"atoll_creates_refused_total{short="memory"} 4"#,
            "atoll_disk_free_bytes 5",
            r#"atoll_databases{status="hibernated"} 7"#,
            "atoll_network_bytes_sent_total 5",
            "atoll_network_bytes_received_total 6",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
