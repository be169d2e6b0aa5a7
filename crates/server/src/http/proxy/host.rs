//! `{port}-{id}.{suffix}`: which requests are for a port by the host that they name. Pure.

use api::SandboxId;
use http::{HeaderMap, Uri, header::HOST};

use crate::config::{PreviewAccess, PreviewConfig};

/// What the host of a request says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Named {
    Api,
    Port(u16, SandboxId),
    /// The host of a port, but of none that there can be.
    Nothing,
}

pub(in super::super) fn named(config: &PreviewConfig, uri: &Uri, headers: &HeaderMap) -> Named {
    if config.access == PreviewAccess::Off {
        return Named::Api;
    }
    let mut hosts = headers.get_all(HOST).iter();
    let header = hosts.next().and_then(|host| host.to_str().ok());
    let host = uri.authority().map(http::uri::Authority::as_str).or(header).unwrap_or_default();
    let said = read(config, host);
    match said {
        // Whoever says two things means neither.
        Named::Port(..) if hosts.next().is_some() => Named::Nothing,
        Named::Api
            if hosts
                .any(|host| host.to_str().is_ok_and(|host| read(config, host) != Named::Api)) =>
        {
            Named::Nothing
        }
        Named::Api | Named::Port(..) | Named::Nothing => said,
    }
}

fn read(config: &PreviewConfig, host: &str) -> Named {
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    let Some((label, suffix)) = name.split_once('.') else { return Named::Api };
    let Some((port, id)) = label.split_once('-') else { return Named::Api };
    if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return Named::Api;
    }
    if config.suffix.as_ref().is_some_and(|known| !known.eq_ignore_ascii_case(suffix)) {
        // Some other host, at which this server happens to be reached.
        return if id.parse::<SandboxId>().is_ok() { Named::Nothing } else { Named::Api };
    }
    match (port.parse::<u16>(), id.parse()) {
        (Ok(port), Ok(id)) if port > 0 => Named::Port(port, id),
        _ => Named::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0b0e4a34-55f5-4a4e-9c0c-1f2a3b4c5d6e";

    fn of(suffix: Option<&str>, host: &str) -> Named {
        let config =
            PreviewConfig { suffix: suffix.map(str::to_owned), ..PreviewConfig::default() };
        let mut headers = HeaderMap::new();
        headers.insert(HOST, host.parse().unwrap());
        named(&config, &Uri::from_static("/v1/sandboxes"), &headers)
    }

    #[test]
    fn a_host_names_a_port_as_the_clients_write_it() {
        let port = Named::Port(8080, ID.parse().unwrap());
        for host in [
            format!("8080-{ID}.preview.example"),
            format!("8080-{ID}.preview.example:8443"),
            format!("8080-{}.PREVIEW.example.", ID.to_uppercase()),
        ] {
            assert_eq!(of(None, &host), port, "{host}");
            assert_eq!(of(Some("preview.example"), &host), port, "{host}");
            assert_eq!(of(Some("other.example"), &host), Named::Nothing, "{host}");
        }
        for host in [
            "api.preview.example",
            "localhost:8080",
            "127.0.0.1",
            "[::1]:80",
            "x-y.example",
            "-a.b",
        ] {
            assert_eq!(of(None, host), Named::Api, "{host}");
        }
        for label in [
            "8080-x",
            "0-0b0e4a34-55f5-4a4e-9c0c-1f2a3b4c5d6e",
            "99999-0b0e4a34-55f5-4a4e-9c0c-1f2a3b4c5d6e",
        ] {
            assert_eq!(of(None, &format!("{label}.preview.example")), Named::Nothing, "{label}");
        }
    }

    #[test]
    fn the_authority_of_a_whole_url_counts_and_two_hosts_are_none() {
        let config = PreviewConfig::default();
        let uri: Uri = format!("http://80-{ID}.a.b/").parse().unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(HOST, "api.a.b".parse().unwrap());
        assert_eq!(named(&config, &uri, &headers), Named::Port(80, ID.parse().unwrap()));
        headers.append(HOST, format!("81-{ID}.a.b").parse().unwrap());
        let path = Uri::from_static("/");
        assert_eq!(named(&config, &path, &headers), Named::Nothing);
        let off = PreviewConfig { access: PreviewAccess::Off, ..PreviewConfig::default() };
        assert_eq!(named(&off, &uri, &headers), Named::Api);
    }
}
