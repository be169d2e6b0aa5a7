//! What of a head goes on to the other side, and what is changed on the way. Pure.

use std::net::IpAddr;

use http::{
    HeaderMap, HeaderName, HeaderValue, Uri,
    header::{
        CONNECTION, CONTENT_LENGTH, CONTENT_SECURITY_POLICY, CONTENT_TYPE, EXPECT, HOST, LOCATION,
        PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, SET_COOKIE, TE, TRAILER, TRANSFER_ENCODING,
        UPGRADE,
    },
};

use super::{Visit, Way, credentials::COOKIE};

/// Those of a connection, not of what is said over it, beside those that `Connection` names (RFC 9110, 7.6.1).
const HOP_BY_HOP: [HeaderName; 10] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("http2-settings"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// A guest may not say these for the API's own origin.
const OF_THE_ORIGIN: [&str; 6] = [
    "clear-site-data",
    "service-worker-allowed",
    "strict-transport-security",
    "alt-svc",
    "public-key-pins",
    "origin-agent-cluster",
];

/// Pages below the API's own origin are in none: they read neither the API nor each other.
const SANDBOX: HeaderValue = HeaderValue::from_static(
    "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts",
);

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const FORWARDED_PREFIX: HeaderName = HeaderName::from_static("x-forwarded-prefix");
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Whether a client wants to speak WebSocket. Nothing else is spoken on.
pub(super) fn wants_websocket(headers: &HeaderMap) -> bool {
    let asks = list(headers, &CONNECTION).any(|name| name.eq_ignore_ascii_case("upgrade"));
    let mut protocols = list(headers, &UPGRADE);
    asks && protocols.next().is_some_and(|name| name.eq_ignore_ascii_case("websocket"))
        && protocols.next().is_none()
}

fn list<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|name| !name.is_empty())
}

fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<_> =
        list(headers, &CONNECTION).filter_map(|name| name.parse::<HeaderName>().ok()).collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

fn set_websocket(headers: &mut HeaderMap) {
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
}

/// The head of a request on its way in. Its credentials are gone already.
pub(super) fn inward(headers: &mut HeaderMap, visit: &Visit, uri: &Uri, peer: Option<IpAddr>) {
    let websocket = wants_websocket(headers);
    let host = own_host(headers, uri);
    strip_hop_by_hop(headers);
    // The body is framed anew by its true length, and its sender was told to go on.
    headers.remove(CONTENT_LENGTH);
    headers.remove(EXPECT);
    if websocket {
        set_websocket(headers);
    }
    let before = headers.get(FORWARDED_FOR).and_then(|value| value.to_str().ok());
    if let Some(peer) = peer {
        let all = before.map_or_else(|| peer.to_string(), |before| format!("{before}, {peer}"));
        if let Ok(all) = HeaderValue::from_str(&all) {
            headers.insert(FORWARDED_FOR, all);
        }
    }
    headers.entry(FORWARDED_PROTO).or_insert(HeaderValue::from_static("http"));
    if let Some(host) = &host {
        headers.entry(FORWARDED_HOST).or_insert_with(|| host.clone());
    }
    match &visit.way {
        Way::Path { prefix } => {
            if let Ok(prefix) = HeaderValue::from_str(prefix) {
                headers.insert(FORWARDED_PREFIX, prefix);
            }
            let local = HeaderValue::from_str(&format!("localhost:{}", visit.port));
            headers.insert(HOST, local.unwrap_or(HeaderValue::from_static("localhost")));
        }
        Way::Host => {
            headers.remove(FORWARDED_PREFIX);
            headers.insert(HOST, host.unwrap_or(HeaderValue::from_static("localhost")));
        }
    }
}

/// As the client has it; the authority of a whole URL is the better one (RFC 9112, 3.2.2).
fn own_host(headers: &HeaderMap, uri: &Uri) -> Option<HeaderValue> {
    let authority = uri.authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok());
    authority.or_else(|| headers.get(HOST).cloned())
}

/// The head of an answer on its way out.
pub(super) fn outward(headers: &mut HeaderMap, visit: &Visit, websocket: bool) {
    // Beside chunks it says nothing of the body (RFC 9112, 6.3).
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    strip_hop_by_hop(headers);
    if websocket {
        set_websocket(headers);
    }
    if headers
        .get(CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
    {
        // For proxies in front of this one.
        headers.entry(ACCEL_BUFFERING).or_insert(HeaderValue::from_static("no"));
    }
    let cookies: Vec<_> = headers.get_all(SET_COOKIE).iter().cloned().collect();
    headers.remove(SET_COOKIE);
    for cookie in cookies.iter().filter_map(|cookie| scoped(cookie.to_str().ok()?, visit)) {
        headers.append(SET_COOKIE, cookie);
    }
    let Way::Path { prefix } = &visit.way else { return };
    for name in OF_THE_ORIGIN {
        headers.remove(name);
    }
    // Beside the guest's own: all of them count.
    headers.append(CONTENT_SECURITY_POLICY, SANDBOX);
    if let Some(location) = headers.get(LOCATION).and_then(|value| value.to_str().ok())
        && let Some(below) = below(location, prefix, visit.port)
        && let Ok(below) = HeaderValue::from_str(&below)
    {
        headers.insert(LOCATION, below);
    }
}

/// A cookie for this port alone: of no other host, and below its prefix where it has one. `None`: it takes the place of
/// ours.
fn scoped(cookie: &str, visit: &Visit) -> Option<HeaderValue> {
    let mut parts = cookie.split(';');
    let pair = parts.next()?.trim();
    if pair.split('=').next()?.trim().eq_ignore_ascii_case(COOKIE) {
        return None;
    }
    let mut kept = vec![pair.to_owned()];
    let mut path = "/";
    for part in parts {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        if name.trim().eq_ignore_ascii_case("domain") {
            continue;
        }
        if name.trim().eq_ignore_ascii_case("path") {
            path = value.trim();
            continue;
        }
        kept.push(part.trim().to_owned());
    }
    let path = if path.starts_with('/') { path } else { "/" };
    kept.push(match &visit.way {
        Way::Path { prefix } => format!("Path={prefix}{path}"),
        Way::Host => format!("Path={path}"),
    });
    HeaderValue::from_str(&kept.join("; ")).ok()
}

/// Where a redirect of the guest's leads, seen from outside.
fn below(location: &str, prefix: &str, port: u16) -> Option<String> {
    if location.starts_with('/') && !location.starts_with("//") {
        return Some(format!("{prefix}{location}"));
    }
    let rest = location.strip_prefix("http://")?;
    let (host, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let own = ["localhost", "127.0.0.1", "[::1]"].map(|name| format!("{name}:{port}"));
    let is_own = own.iter().any(|own| own.eq_ignore_ascii_case(host))
        || (port == 80 && ["localhost", "127.0.0.1"].contains(&host));
    let slash = if path.starts_with('/') { "" } else { "/" };
    is_own.then(|| format!("{prefix}{slash}{path}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PREFIX: &str = "/v1/sandboxes/x/proxy/80";

    fn visit(way: Way) -> Visit {
        Visit {
            account: api::AccountId::default_account(),
            sandbox: api::SandboxId::random(),
            port: 8080,
            way,
            new_cookie: None,
        }
    }

    fn by_path() -> Visit {
        visit(Way::Path { prefix: PREFIX.to_owned() })
    }

    fn map(headers: &[(&'static str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        map
    }

    fn texts(headers: &HeaderMap, name: &str) -> Vec<String> {
        headers.get_all(name).iter().map(|value| value.to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn what_belongs_to_the_connection_stays_behind() {
        let mut headers = map(&[
            ("connection", "close, X-Secret"),
            ("connection", "keep-alive"),
            ("x-secret", "1"),
            ("keep-alive", "timeout=5"),
            ("proxy-authorization", "Basic x"),
            ("te", "trailers"),
            ("trailer", "x"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("http2-settings", "x"),
            ("content-length", "5"),
            ("expect", "100-continue"),
            ("accept", "*/*"),
            ("host", "api.example"),
        ]);
        inward(&mut headers, &by_path(), &Uri::from_static("/x"), None);
        let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            ["accept", "host", "x-forwarded-host", "x-forwarded-prefix", "x-forwarded-proto"]
        );
        assert_eq!(headers["host"], "localhost:8080");
    }

    #[test]
    fn a_guest_learns_who_asks_and_how_it_is_reached() {
        let given = [("host", "8080-x.preview.example"), ("x-forwarded-for", "192.0.2.1")];
        let peer = Some(IpAddr::from([192, 0, 2, 2]));
        let mut headers = map(&given);
        inward(&mut headers, &visit(Way::Host), &Uri::from_static("/x"), peer);
        assert_eq!(headers["x-forwarded-for"], "192.0.2.1, 192.0.2.2");
        assert_eq!(headers["host"], "8080-x.preview.example");
        assert_eq!(headers["x-forwarded-host"], "8080-x.preview.example");
        assert!(!headers.contains_key("x-forwarded-prefix"));
        let mut headers = map(&[("host", "api.example"), ("x-forwarded-proto", "https")]);
        inward(&mut headers, &by_path(), &Uri::from_static("/x"), peer);
        assert_eq!(headers["x-forwarded-for"], "192.0.2.2");
        assert_eq!(headers["x-forwarded-proto"], "https");
        assert_eq!(headers["x-forwarded-prefix"], PREFIX);
    }

    #[test]
    fn only_websockets_are_spoken_on() {
        for (connection, upgrade, expected) in [
            ("Upgrade", "websocket", true),
            ("keep-alive, upgrade", "WebSocket", true),
            ("keep-alive", "websocket", false),
            ("Upgrade", "h2c", false),
            ("Upgrade", "websocket, h2c", false),
        ] {
            let mut headers = map(&[("connection", connection), ("upgrade", upgrade)]);
            assert_eq!(wants_websocket(&headers), expected, "{connection} {upgrade}");
            inward(&mut headers, &by_path(), &Uri::from_static("/"), None);
            assert_eq!(headers.contains_key("upgrade"), expected);
        }
    }

    #[test]
    fn a_length_beside_chunks_says_nothing() {
        let mut headers = map(&[("content-length", "2"), ("transfer-encoding", "chunked")]);
        outward(&mut headers, &visit(Way::Host), false);
        assert!(headers.is_empty(), "{headers:?}");
        let mut headers = map(&[("content-length", "2")]);
        outward(&mut headers, &visit(Way::Host), false);
        assert_eq!(headers["content-length"], "2");
    }

    #[test]
    fn cookies_are_for_this_port_alone() {
        let given = [
            ("set-cookie", "a=1; Domain=example.com; Path=/app; HttpOnly"),
            ("set-cookie", "b=2"),
            ("set-cookie", "atoll_preview=forged; Path=/"),
        ];
        let mut headers = map(&given);
        outward(&mut headers, &by_path(), false);
        assert_eq!(
            texts(&headers, "set-cookie"),
            [format!("a=1; HttpOnly; Path={PREFIX}/app"), format!("b=2; Path={PREFIX}/")]
        );
        let mut headers = map(&given);
        outward(&mut headers, &visit(Way::Host), false);
        assert_eq!(texts(&headers, "set-cookie"), ["a=1; HttpOnly; Path=/app", "b=2; Path=/"]);
    }

    #[test]
    fn redirects_stay_below_the_prefix() {
        for (location, expected) in [
            ("/login?a=b", format!("{PREFIX}/login?a=b")),
            ("http://localhost:8080/x", format!("{PREFIX}/x")),
            ("http://127.0.0.1:8080", format!("{PREFIX}/")),
            ("http://localhost:9090/x", "http://localhost:9090/x".to_owned()),
            ("//elsewhere/x", "//elsewhere/x".to_owned()),
            ("relative", "relative".to_owned()),
            ("https://example.com/", "https://example.com/".to_owned()),
        ] {
            let mut headers = map(&[("location", location)]);
            outward(&mut headers, &by_path(), false);
            assert_eq!(texts(&headers, "location"), [expected], "{location}");
            let mut headers = map(&[("location", location)]);
            outward(&mut headers, &visit(Way::Host), false);
            assert_eq!(texts(&headers, "location"), [location]);
        }
    }

    #[test]
    fn a_page_below_the_apis_origin_is_in_none() {
        let given = [("content-security-policy", "default-src *"), ("clear-site-data", "\"*\"")];
        let mut headers = map(&given);
        outward(&mut headers, &by_path(), false);
        let policies = texts(&headers, "content-security-policy");
        assert!(policies.len() == 2 && policies[1].starts_with("sandbox "));
        assert!(!policies[1].contains("allow-same-origin"));
        assert!(!headers.contains_key("clear-site-data"));
        let mut headers = map(&given);
        outward(&mut headers, &visit(Way::Host), false);
        assert_eq!(texts(&headers, "content-security-policy"), ["default-src *"]);
    }

    proptest! {
        #[test]
        fn no_cookie_leaves_its_prefix(cookie in "[ -~]{0,60}") {
            if let Some(scoped) = scoped(&cookie, &by_path()) {
                let scoped = scoped.to_str().unwrap().to_ascii_lowercase();
                let attributes: Vec<_> = scoped.split(';').skip(1).map(str::trim).collect();
                prop_assert_eq!(attributes.iter().filter(|part| part.split('=').next().is_some_and(|name| name.trim() == "path")).count(), 1);
                let path = format!("path={PREFIX}/");
                prop_assert!(attributes.last().unwrap().starts_with(&path));
                prop_assert!(!attributes.iter().any(|part| part.split('=').next().is_some_and(|name| name.trim() == "domain")));
            }
        }
    }
}
