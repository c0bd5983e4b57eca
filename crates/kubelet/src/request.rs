//! Requests to the server, read from paths and queries, without effects.

use http::{Method, StatusCode};
use jiff::{SignedDuration, Timestamp};
use monopod_core::pod::log::Query;

/// Which container a request is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Uid of the pod, if the path has it.
    pub uid: Option<String>,
    /// Name of the container, empty for the pod as a whole.
    pub container: String,
}

/// Which log is asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// Which lines.
    pub query: Query,
    /// Whether to go on.
    pub follow: bool,
    /// Of the run before.
    pub previous: bool,
}

/// What a client of exec or attach wants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "four independent parameters of the request"
)]
pub struct ExecOptions {
    /// To execute; empty for attach.
    pub command: Vec<String>,
    /// Whether the client writes.
    pub stdin: bool,
    /// Whether it reads standard output.
    pub stdout: bool,
    /// Whether it reads standard error.
    pub stderr: bool,
    /// Whether there is to be a terminal.
    pub terminal: bool,
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// `/healthz`
    Health,
    /// `/containerLogs/…`
    Logs(Target, LogOptions),
    /// `/exec/…`
    Exec(Target, ExecOptions),
    /// `/attach/…`
    Attach(Target, ExecOptions),
    /// `/portForward/…`; the target names no container.
    Forward(Target),
}

/// Why a request is refused: a status and a text.
pub type Refused = (StatusCode, String);

/// Reads a request.
pub fn read(method: &Method, path: &str, query: &str, now: Timestamp) -> Result<Asked, Refused> {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let pairs: Vec<(String, String)> = form_urlencoded::parse(query.as_bytes())
        .into_owned()
        .collect();
    let get = *method == Method::GET;
    match (parts[0], &parts[1..]) {
        ("healthz", []) if get => Ok(Asked::Health),
        ("containerLogs", [namespace, pod, container]) if get => {
            let target = target(namespace, pod, None, container);
            Ok(Asked::Logs(target, log_options(&pairs, now)?))
        }
        (kind @ ("exec" | "attach"), rest) => {
            let target = match *rest {
                [namespace, pod, container] => target(namespace, pod, None, container),
                [namespace, pod, uid, container] => target(namespace, pod, Some(uid), container),
                _ => return Err(not_found()),
            };
            if !get {
                return Err(no_spdy());
            }
            let options = options(&pairs)?;
            if kind == "attach" {
                return Ok(Asked::Attach(target, options));
            }
            if options.command.is_empty() {
                return Err((
                    StatusCode::BAD_REQUEST,
                    "you must specify a command".to_owned(),
                ));
            }
            Ok(Asked::Exec(target, options))
        }
        ("portForward", rest) => {
            let target = match *rest {
                [namespace, pod] => target(namespace, pod, None, ""),
                [namespace, pod, uid] => target(namespace, pod, Some(uid), ""),
                _ => return Err(not_found()),
            };
            if get {
                Ok(Asked::Forward(target))
            } else {
                Err(no_spdy())
            }
        }
        _ => Err(not_found()),
    }
}

fn no_spdy() -> Refused {
    let text = "SPDY is not supported: use a client that speaks WebSocket (kubectl 1.31 or later)";
    (StatusCode::BAD_REQUEST, text.to_owned())
}

fn not_found() -> Refused {
    (StatusCode::NOT_FOUND, "404 page not found".to_owned())
}

fn target(namespace: &str, pod: &str, uid: Option<&str>, container: &str) -> Target {
    Target {
        namespace: namespace.to_owned(),
        pod: pod.to_owned(),
        uid: uid.map(str::to_owned),
        container: container.to_owned(),
    }
}

fn options(pairs: &[(String, String)]) -> Result<ExecOptions, Refused> {
    let is = |name: &str| pairs.iter().any(|(key, value)| key == name && value == "1");
    let options = ExecOptions {
        command: pairs
            .iter()
            .filter(|(key, _)| key == "command")
            .map(|(_, value)| value.clone())
            .collect(),
        stdin: is("input"),
        stdout: is("output"),
        stderr: is("error"),
        terminal: is("tty"),
    };
    if !options.stdin && !options.stdout && !options.stderr {
        return Err((
            StatusCode::BAD_REQUEST,
            "you must specify at least 1 of stdin, stdout, stderr".to_owned(),
        ));
    }
    Ok(options)
}

fn log_options(pairs: &[(String, String)], now: Timestamp) -> Result<LogOptions, Refused> {
    let mut options = LogOptions::default();
    let number = |key: &str, value: &str, least: u64| {
        value
            .parse::<u64>()
            .ok()
            .filter(|number| *number >= least)
            .ok_or_else(|| {
                let text = format!("{key} must be a number, at least {least}");
                (StatusCode::UNPROCESSABLE_ENTITY, text)
            })
    };
    for (key, value) in pairs {
        match key.as_str() {
            "follow" => options.follow = value == "true" || value == "1",
            "previous" => options.previous = value == "true" || value == "1",
            "timestamps" => options.query.timestamps = value == "true" || value == "1",
            "tailLines" => {
                let lines = number(key, value, 0)?;
                options.query.tail = Some(usize::try_from(lines).unwrap_or(usize::MAX));
            }
            "limitBytes" => {
                let bytes = number(key, value, 1)?;
                options.query.limit = Some(usize::try_from(bytes).unwrap_or(usize::MAX));
            }
            "sinceSeconds" => {
                let seconds = i64::try_from(number(key, value, 1)?).unwrap_or(i64::MAX);
                let since = now.checked_sub(SignedDuration::from_secs(seconds));
                options.query.since = Some(since.unwrap_or(Timestamp::MIN));
            }
            "sinceTime" => {
                let time = value.parse().ok().ok_or_else(|| {
                    let text = "sinceTime must be a time as in RFC 3339".to_owned();
                    (StatusCode::BAD_REQUEST, text)
                })?;
                options.query.since = Some(time);
            }
            _ => {}
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(path: &str, query: &str) -> Result<Asked, u16> {
        read(&Method::GET, path, query, Timestamp::UNIX_EPOCH)
            .map_err(|(status, _)| status.as_u16())
    }

    #[test]
    fn logs() {
        let Ok(Asked::Logs(target, options)) = ask(
            "/containerLogs/ns/p/c",
            "follow=true&tailLines=5&limitBytes=9&timestamps=true&sinceTime=2026-01-01T00%3A00%3A00Z",
        ) else {
            panic!("not read")
        };
        assert_eq!((target.pod.as_str(), target.container.as_str()), ("p", "c"));
        assert!(options.follow && options.query.timestamps && !options.previous);
        assert_eq!(options.query.tail, Some(5));
        assert_eq!(options.query.limit, Some(9));
        assert_eq!(ask("/containerLogs/ns/p/c", "tailLines=-1"), Err(422));
        assert_eq!(ask("/containerLogs/ns/p/c", "sinceTime=x"), Err(400));
    }

    #[test]
    fn exec_and_attach() {
        let Ok(Asked::Exec(target, options)) = ask(
            "/exec/ns/p/uid/c",
            "command=sh&command=-c&command=a%20b&input=1&output=1&tty=1",
        ) else {
            panic!("not read")
        };
        assert_eq!(target.uid.as_deref(), Some("uid"));
        assert_eq!(options.command, ["sh", "-c", "a b"]);
        assert!(options.stdin && options.terminal && !options.stderr);
        assert!(matches!(
            ask("/attach/ns/p/c", "output=1"),
            Ok(Asked::Attach(..))
        ));
        assert_eq!(ask("/exec/ns/p/c", "output=1"), Err(400));
        assert_eq!(ask("/exec/ns/p/c", "command=x"), Err(400));
    }

    #[test]
    fn everything_else_is_refused() {
        for path in [
            "/",
            "/pods",
            "/run/ns/p/c",
            "/debug/pprof",
            "/logs/",
            "/configz",
            "/exec/ns",
        ] {
            assert_eq!(ask(path, ""), Err(404), "{path}");
        }
        assert!(matches!(
            ask("/portForward/ns/p", ""),
            Ok(Asked::Forward(_))
        ));
        let post = read(
            &Method::POST,
            "/exec/ns/p/c",
            "command=x&output=1",
            Timestamp::UNIX_EPOCH,
        );
        assert_eq!(post.unwrap_err().0, StatusCode::BAD_REQUEST);
    }
}
