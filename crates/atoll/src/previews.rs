//! The settings of ports that are shown on hosts of their own.

use std::time::Duration;

use clap::{Args, ValueEnum};
use server::{PreviewAccess, PreviewConfig};

#[derive(Args)]
pub(crate) struct Previews {
    /// Who may look at PORT-ID.SUFFIX, without a key
    #[arg(
        long,
        env = "ATOLL_PREVIEW_ACCESS",
        value_name = "WHO",
        value_enum,
        default_value_t = Who::Open
    )]
    preview_access: Who,
    /// The domain of those hosts, such as preview.example.com [default: any]
    #[arg(long, env = "ATOLL_PREVIEW_SUFFIX", value_name = "DOMAIN")]
    preview_suffix: Option<String>,
    /// For a server in a sandbox to begin its answer, in seconds
    #[arg(long, env = "ATOLL_PROXY_DEADLINE", value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    proxy_deadline: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Who {
    /// Whoever knows the sandbox's id
    Open,
    /// Whoever has a preview token
    Token,
    /// Nobody: there are no such hosts
    Off,
}

impl Previews {
    pub(crate) fn config(&self) -> PreviewConfig {
        let suffix = self.preview_suffix.as_deref().map(|suffix| suffix.trim_matches('.'));
        PreviewConfig {
            access: match self.preview_access {
                Who::Open => PreviewAccess::Open,
                Who::Token => PreviewAccess::Token,
                Who::Off => PreviewAccess::Off,
            },
            suffix: suffix.filter(|suffix| !suffix.is_empty()).map(str::to_ascii_lowercase),
            answer_deadline: Duration::from_secs(self.proxy_deadline),
        }
    }
}
