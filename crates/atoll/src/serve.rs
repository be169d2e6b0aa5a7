//! `atoll serve`: the server.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use clap::Args;
use serde::Serialize;

use crate::{
    failure::Failure,
    interrupt,
    logging::{self, LogFormat},
    output::{Output, remark},
    settings::{Settings, require_root},
};

/// Run the server (as root)
///
/// Prints where it listens as lines for a shell, and the first time a key as well: it is shown that once. Logs go to
/// standard error; ATOLL_LOG sets their level.
///
/// An interrupt or SIGTERM ends the server, a second one without waiting for anything. Sandboxes go on and are found
/// again by the next one.
#[derive(Args)]
#[command(after_help = "\
Examples:
  atoll serve
  atoll serve --listen 0.0.0.0:8080 --database postgres://atoll@db/atoll
  atoll serve --egress-allow 10.1.2.3/32:5432      # let sandboxes reach one database

Every option is also a variable: --data-dir is ATOLL_DATA_DIR.
A key in ATOLL_API_KEY is valid while this server runs.")]
pub(crate) struct Serve {
    /// Address and port; port 0 takes a free one
    #[arg(long, env = "ATOLL_LISTEN", value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    #[command(flatten)]
    settings: Settings,
    /// For people or for programs
    #[arg(long, env = "ATOLL_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

impl Serve {
    pub(crate) async fn run(self, output: Output) -> anyhow::Result<()> {
        require_root("serve")?;
        #[cfg(feature = "failpoints")]
        fault::obey()?;
        logging::start(self.log_format, "info,sqlx=error");
        let config = self.settings.config(self.listen)?;
        let ready = move |address, first_key| {
            if let Err(error) = announce(output, address, first_key) {
                remark(format_args!("warning: nobody reads where the server listens: {error}"));
            }
        };
        let (first, second) = interrupt::requested_twice()?;
        tokio::select! {
            ended = server::run(config, ready, first) => Ok(ended?),
            () = second => {
                Err(Failure::new("ended at the second request, without waiting for what was under way")
                    .hint("the next start removes what is left over")
                    .into())
            }
        }
    }
}

fn announce(output: Output, address: SocketAddr, key: Option<String>) -> io::Result<()> {
    #[derive(Serialize)]
    struct Announcement {
        url: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        key: Option<String>,
    }
    output.show(&Announcement { url: url_of(address), key }, |Announcement { url, key }| {
        let key = key.as_ref().map_or_else(String::new, |key| format!("\nexport ATOLL_KEY={key}"));
        format!("export ATOLL_URL={url}{key}")
    })
}

/// Where a client of the same host finds a server that listens on `address`.
pub(crate) fn url_of(mut address: SocketAddr) -> String {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        IpAddr::V4(_) | IpAddr::V6(_) => {}
    }
    format!("http://{address}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_is_one_that_a_client_can_use() {
        for (listen, url) in [
            ("0.0.0.0:80", "http://127.0.0.1:80"),
            ("[::]:81", "http://[::1]:81"),
            ("10.0.0.7:82", "http://10.0.0.7:82"),
        ] {
            assert_eq!(url_of(listen.parse().unwrap()), url);
        }
    }
}
