//! Where a visitor's credentials are in a request, and how they are taken out again: a guest sees none that are ours.

use http::{
    HeaderMap, HeaderName, HeaderValue, Uri,
    header::{AUTHORIZATION, COOKIE as COOKIES},
};

use super::super::fields::decoded_fields;

/// Of a preview's token, once it came in the query.
pub(super) const COOKIE: &str = "atoll_preview";
/// For those that cannot set a header: browsers' WebSockets, links.
const FIELD: &str = "access_token";
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    ApiKey,
    Bearer,
    Query,
    Cookie,
}

/// All that is offered, in the order in which it is looked at.
pub(super) fn offered(headers: &HeaderMap, query: &str) -> Vec<(Place, String)> {
    let text = |value: &HeaderValue| Some(value.to_str().ok()?.trim().to_owned());
    let of = |place| move |value| (place, value);
    let keys = headers.get_all(API_KEY).iter().filter_map(text).map(of(Place::ApiKey));
    let fields = decoded_fields(query.as_bytes()).into_iter();
    let fields = fields.filter(|(name, _)| name == FIELD.as_bytes());
    let fields = fields.filter_map(|(_, value)| String::from_utf8(value).ok());
    let bearers = headers.get_all(AUTHORIZATION).iter().filter_map(|value| {
        let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim().to_owned())
    });
    let cookies = headers.get_all(COOKIES).iter().filter_map(|value| value.to_str().ok());
    let cookies = cookies.flat_map(|value| value.split(';')).filter_map(|pair| {
        let (name, value) = pair.split_once('=')?;
        (name.trim() == COOKIE).then(|| value.trim().to_owned())
    });
    keys.chain(fields.map(of(Place::Query)))
        .chain(cookies.map(of(Place::Cookie)))
        .chain(bearers.map(of(Place::Bearer)))
        .collect()
}

/// Takes out what [`offered`] has found at these places, and our cookie always.
pub(super) fn withdraw(headers: &mut HeaderMap, uri: &mut Uri, places: &[Place]) {
    if places.contains(&Place::ApiKey) {
        headers.remove(API_KEY);
    }
    if places.contains(&Place::Bearer) {
        headers.remove(AUTHORIZATION);
    }
    let cookies: Vec<_> = headers.get_all(COOKIES).iter().cloned().collect();
    headers.remove(COOKIES);
    for cookie in cookies {
        let Ok(text) = cookie.to_str() else {
            // Ours is text; what stands beside it cannot be told apart safely.
            if !contains(cookie.as_bytes(), COOKIE.as_bytes()) {
                headers.append(COOKIES, cookie);
            }
            continue;
        };
        let is_ours = |pair: &str| pair.split('=').next().unwrap_or_default().trim() == COOKIE;
        let kept: Vec<_> = text.split(';').filter(|pair| !is_ours(pair)).map(str::trim).collect();
        let kept = kept.join("; ");
        if let (false, Ok(kept)) = (kept.is_empty(), HeaderValue::from_str(&kept)) {
            headers.append(COOKIES, kept);
        }
    }
    if places.contains(&Place::Query) {
        *uri = without_field(uri);
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// The rest of the query as it was written.
fn without_field(uri: &Uri) -> Uri {
    let query = uri.query().unwrap_or_default();
    let is_ours = |field: &&str| {
        decoded_fields(field.as_bytes()).iter().any(|(name, _)| name == FIELD.as_bytes())
    };
    let kept: Vec<_> = query.split('&').filter(|field| !is_ours(field)).collect();
    let path = if kept.is_empty() {
        uri.path().to_owned()
    } else {
        format!("{}?{}", uri.path(), kept.join("&"))
    };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = path.parse().ok();
    Uri::from_parts(parts).unwrap_or_else(|_| Uri::from_static("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(all: &[(&'static str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in all {
            map.append(*name, value.parse().unwrap());
        }
        map
    }

    #[test]
    fn credentials_are_found_wherever_they_are() {
        let map = headers(&[
            ("authorization", "Bearer b"),
            ("x-api-key", "k"),
            ("cookie", "x=y; atoll_preview=c"),
        ]);
        let found = offered(&map, "a=b&access%5Ftoken=q%2D1");
        let expected = [
            (Place::ApiKey, "k"),
            (Place::Query, "q-1"),
            (Place::Cookie, "c"),
            (Place::Bearer, "b"),
        ];
        assert_eq!(found, expected.map(|(place, value)| (place, value.to_owned())));
        assert_eq!(offered(&headers(&[("authorization", "Basic b")]), ""), []);
    }

    #[test]
    fn nothing_of_ours_goes_on_and_all_else_does() {
        let mut map = headers(&[
            ("authorization", "Bearer b"),
            ("x-api-key", "k"),
            ("cookie", "x=y; atoll_preview=c; z"),
            ("cookie", "atoll_preview=d"),
            ("accept", "*/*"),
        ]);
        let mut uri: Uri = "/p%41th?a=b%20c&access_token=q&d&access%5Ftoken=r".parse().unwrap();
        withdraw(&mut map, &mut uri, &[Place::ApiKey, Place::Bearer, Place::Query]);
        assert_eq!(map, headers(&[("cookie", "x=y; z"), ("accept", "*/*")]));
        assert_eq!(uri, "/p%41th?a=b%20c&d");
        let mut map = headers(&[("authorization", "Bearer theirs")]);
        let mut uri: Uri = "/x?access_token=theirs".parse().unwrap();
        withdraw(&mut map, &mut uri, &[]);
        assert_eq!((map.len(), uri.to_string().as_str()), (1, "/x?access_token=theirs"));
        let mut uri: Uri = "/x?access_token=ours".parse().unwrap();
        withdraw(&mut map, &mut uri, &[Place::Query]);
        assert_eq!(uri, "/x");
    }
}
