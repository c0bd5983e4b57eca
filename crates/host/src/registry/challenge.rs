//! What a registry wants to see before it answers: a password, or a token of its token server.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http_auth::parser::ChallengeParser;
use monopod_core::image::keyring::Credential;
use reqwest::header::{HeaderMap, WWW_AUTHENTICATE};
use serde::Deserialize;

/// Longest token; those in use have a few kilobytes.
const TOKEN: usize = 64 << 10;

/// How a registry wants to be told who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    /// By user name and password with each request.
    Basic,
    /// By a token from this place.
    Bearer {
        realm: String,
        service: Option<String>,
    },
}

/// The challenges of an answer; a token is preferred, as it shows the password to fewer servers.
pub(super) fn parse(headers: &HeaderMap) -> Option<Challenge> {
    let mut basic = None;
    for header in headers.get_all(WWW_AUTHENTICATE) {
        let Ok(text) = header.to_str() else { continue };
        for challenge in ChallengeParser::new(text).map_while(Result::ok) {
            let parameter = |wanted: &str| {
                challenge
                    .params
                    .iter()
                    .find(|(name, _)| name.eq_ignore_ascii_case(wanted))
                    .map(|(_, value)| value.to_unescaped())
            };
            if challenge.scheme.eq_ignore_ascii_case("Bearer") {
                if let Some(realm) = parameter("realm") {
                    return Some(Challenge::Bearer {
                        realm,
                        service: parameter("service"),
                    });
                }
            } else if challenge.scheme.eq_ignore_ascii_case("Basic") {
                basic = Some(Challenge::Basic);
            }
        }
    }
    basic
}

/// The header that shows a user name and a password.
pub(super) fn basic(credential: &Credential) -> String {
    let pair = format!("{}:{}", credential.username, credential.password);
    format!("Basic {}", BASE64_STANDARD.encode(pair))
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

/// The header that shows the token of a token server's answer; none if it holds none.
pub(super) fn bearer(answer: &[u8]) -> Option<String> {
    let Token {
        token,
        access_token,
    } = serde_json::from_slice(answer).ok()?;
    let token = token.filter(|t| !t.is_empty()).or(access_token)?;
    // It becomes a header's value.
    let visible = token.bytes().all(|byte| byte.is_ascii_graphic());
    (visible && !token.is_empty() && token.len() <= TOKEN).then(|| format!("Bearer {token}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use reqwest::header::HeaderValue;

    fn headers(values: &[&str]) -> HeaderMap {
        values
            .iter()
            .map(|v| (WWW_AUTHENTICATE, HeaderValue::from_str(v).unwrap()))
            .collect()
    }

    #[test]
    fn challenges_of_registries_are_understood() {
        let bearer = |realm: &str, service: Option<&str>| {
            Some(Challenge::Bearer {
                realm: realm.to_owned(),
                service: service.map(str::to_owned),
            })
        };
        for (values, expected) in [
            (
                &[
                    "Bearer realm=\"https://auth.docker.io/token\",service=\"registry.docker.io\",scope=\"repository:a/b:pull\"",
                ][..],
                bearer("https://auth.docker.io/token", Some("registry.docker.io")),
            ),
            (&["Basic realm=\"Registry\""], Some(Challenge::Basic)),
            (
                &["Basic realm=\"x\"", "bearer realm=\"https://t\""],
                bearer("https://t", None),
            ),
            (
                &["Basic realm=\"x\", Bearer realm=\"https://t\""],
                bearer("https://t", None),
            ),
            (&["Bearer service=\"s\""], None),
            (&["Negotiate"], None),
            (&[""], None),
        ] {
            assert_eq!(parse(&headers(values)), expected, "{values:?}");
        }
    }

    #[test]
    fn tokens_that_are_no_header_are_refused() {
        assert_eq!(bearer(br#"{"token":"t"}"#).as_deref(), Some("Bearer t"));
        assert_eq!(
            bearer(br#"{"token":"","access_token":"a"}"#).as_deref(),
            Some("Bearer a")
        );
        for bad in [
            &b"{}"[..],
            b"",
            br#"{"token":"a\nb"}"#,
            "{\"token\":\"ü\"}".as_bytes(),
            br#"{"token":""}"#,
        ] {
            assert_eq!(bearer(bad), None);
        }
    }

    proptest! {
        #[test]
        fn whatever_comes_is_a_header_or_nothing(text in "[ -~]{0,80}", token in ".{0,20}", bytes: Vec<u8>) {
            let _understood = parse(&headers(&[&text]));
            let answer = serde_json::json!({"token": token}).to_string();
            for answer in [answer.as_bytes(), &bytes[..]] {
                if let Some(header) = bearer(answer) {
                    prop_assert!(HeaderValue::from_str(&header).is_ok());
                }
            }
        }
    }
}
