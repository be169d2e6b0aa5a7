//! The settings of a server that say how much of its host it uses.

use std::{num::NonZeroU32, time::Duration};

use clap::Args;
use server::{Capacity, sandbox::ExecLimits};

const MIB: u64 = 1 << 20;
/// A host has no more slots, and some are for machines that stand ready.
const MOST_MACHINES: std::ops::RangeInclusive<u64> = 1..=1000;

#[derive(Args)]
pub(crate) struct Limits {
    /// Machines that may run at once, beside those that stand ready
    #[arg(long, env = "ATOLL_MOST_MACHINES", value_name = "COUNT", default_value_t = 256,
        value_parser = clap::value_parser!(u64).range(MOST_MACHINES))]
    most_machines: u64,
    /// Memory that stays free when a sandbox is created, in MiB [default: a tenth of the memory, at most 4096]
    ///
    /// Less would leave running sandboxes no memory to grow into.
    #[arg(long, env = "ATOLL_MEMORY_RESERVE", value_name = "MIB")]
    memory_reserve: Option<u64>,
    /// How many times the memory beyond the reserve may be promised to sandboxes
    ///
    /// Sandboxes of a template share what they have not written: an idle one of 2 GiB takes 50 MiB. With 1, all of them
    /// can use all of their memory at the same time.
    #[arg(long, env = "ATOLL_MEMORY_OVERCOMMIT", value_name = "FACTOR", default_value_t = 8.0, value_parser = factor)]
    memory_overcommit: f64,
    /// Room that stays free on the pool when a sandbox is created, in MiB [default: a twentieth of the pool, at most 10240]
    ///
    /// Running sandboxes write into it. Once it is used up they stand still until there is room again.
    #[arg(long, env = "ATOLL_DISK_RESERVE", value_name = "MIB")]
    disk_reserve: Option<u64>,
    /// Memory for requests and answers that are held whole, such as a command's output, in MiB
    #[arg(long, env = "ATOLL_BUFFER_MEMORY", value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u64).range(64..=1_048_576))]
    buffer_memory: u64,
    /// Connections of clients at once; beyond them the one that was idle longest is closed
    #[arg(long, env = "ATOLL_MOST_CONNECTIONS", value_name = "COUNT", default_value_t = 4096, value_parser = clap::value_parser!(u64).range(16..=1_000_000))]
    most_connections: u64,
    /// Requests a second with one key, twice as many in a burst [default: without a limit]
    #[arg(long, env = "ATOLL_RATE_LIMIT", value_name = "REQUESTS")]
    rate_limit: Option<NonZeroU32>,
    /// Commands that may run at once in a sandbox
    #[arg(long, env = "ATOLL_MOST_EXECS", value_name = "COUNT", default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..=900))]
    most_execs: u64,
    /// What is kept of each of a command's two streams, in MiB; more is counted only
    #[arg(long, env = "ATOLL_EXEC_OUTPUT", value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    exec_output: u64,
    /// What is kept of the output of all commands of a sandbox, in MiB; the oldest goes
    #[arg(long, env = "ATOLL_EXEC_OUTPUT_TOTAL", value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=1_048_576))]
    exec_output_total: u64,
    /// Ended commands of which a sandbox keeps record and output; the oldest go
    #[arg(long, env = "ATOLL_EXECS_KEPT", value_name = "COUNT", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    execs_kept: u64,
    /// How long they are kept, in seconds [default: a week]
    #[arg(long, env = "ATOLL_EXECS_KEPT_FOR", value_name = "SECONDS", default_value_t = 604_800, hide_default_value = true, value_parser = clap::value_parser!(u64).range(1..=315_360_000))]
    execs_kept_for: u64,
    /// How long a terminal goes on in its sandbox when its connection is lost, in seconds; attach to it again within that time
    #[arg(long, env = "ATOLL_TERMINAL_LINGER", value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(0..=604_800))]
    terminal_linger: u64,
}

impl Limits {
    pub(crate) fn terminal_linger(&self) -> Duration {
        Duration::from_secs(self.terminal_linger)
    }

    pub(crate) fn execs(&self) -> ExecLimits {
        let count = |number| usize::try_from(number).unwrap_or(usize::MAX);
        ExecLimits {
            output_bytes: self.exec_output.saturating_mul(MIB),
            total_output_bytes: self.exec_output_total.saturating_mul(MIB),
            running: count(self.most_execs),
            kept: count(self.execs_kept),
            kept_for: Duration::from_secs(self.execs_kept_for),
        }
    }

    pub(crate) fn capacity(&self) -> Capacity {
        let count = |number| usize::try_from(number).unwrap_or(usize::MAX);
        Capacity {
            most_machines: count(self.most_machines),
            memory_reserve: self.memory_reserve.map(|mib| mib.saturating_mul(MIB)),
            memory_overcommit: self.memory_overcommit,
            disk_reserve: self.disk_reserve.map(|mib| mib.saturating_mul(MIB)),
            buffer_bytes: self.buffer_memory.saturating_mul(MIB),
            most_connections: count(self.most_connections),
            rate_limit: self.rate_limit,
        }
    }
}

fn factor(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(factor) if (0.1..=1000.0).contains(&factor) => Ok(factor),
        Ok(_) | Err(_) => Err("a number between 0.1 and 1000".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Server {
        #[command(flatten)]
        limits: Limits,
    }

    fn parsed(arguments: &[&str]) -> Result<Capacity, clap::Error> {
        let all = ["server"].iter().chain(arguments);
        <Server as clap::Parser>::try_parse_from(all).map(|server| server.limits.capacity())
    }

    #[test]
    fn the_options_defaults_are_those_of_the_server() {
        assert_eq!(format!("{:?}", parsed(&[]).unwrap()), format!("{:?}", Capacity::default()));
        let execs = <Server as clap::Parser>::parse_from(["server"]).limits.execs();
        assert_eq!(format!("{execs:?}"), format!("{:?}", ExecLimits::default()));
    }

    #[test]
    fn limits_that_nothing_could_live_with_are_refused() {
        for bad in [
            "--memory-overcommit=0",
            "--memory-overcommit=NaN",
            "--rate-limit=0",
            "--most-machines=0",
            "--most-machines=1001",
            "--buffer-memory=1",
        ] {
            assert!(parsed(&[bad]).is_err(), "{bad}");
        }
        let set = parsed(&["--memory-reserve=100", "--disk-reserve=0", "--rate-limit=5"]).unwrap();
        assert_eq!(
            (set.memory_reserve, set.disk_reserve, set.rate_limit),
            (Some(100 << 20), Some(0), NonZeroU32::new(5))
        );
    }
}
