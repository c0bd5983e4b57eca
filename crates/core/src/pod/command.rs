//! What a container executes: the rules of `command`, `args` and `$(VAR)`.

use std::collections::BTreeMap;

/// Replaces `$(NAME)` by the variable's value.
///
/// `$$` is a literal `$`, so `$$(NAME)` stays `$(NAME)`; an unknown name stays as it is.
pub fn expand(text: &str, variables: &BTreeMap<String, String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        if let Some(tail) = after.strip_prefix('$') {
            out.push('$');
            rest = tail;
        } else if let Some((name, tail)) = after
            .strip_prefix('(')
            .and_then(|inner| inner.split_once(')'))
        {
            if let Some(value) = variables.get(name) {
                out.push_str(value);
            } else {
                out.push_str("$(");
                out.push_str(name);
                out.push(')');
            }
            rest = tail;
        } else {
            out.push('$');
            rest = after;
        }
    }
    out.push_str(rest);
    out
}

/// The arguments to execute: `command` replaces the image's entry point and drops its arguments,
/// `args` replaces the image's arguments.
pub fn arguments(
    command: &[String],
    args: &[String],
    entrypoint: &[String],
    cmd: &[String],
    variables: &BTreeMap<String, String>,
) -> Vec<String> {
    let expanded = |list: &[String]| -> Vec<String> {
        list.iter().map(|item| expand(item, variables)).collect()
    };
    let (mut program, rest) = if !command.is_empty() {
        (expanded(command), expanded(args))
    } else if !args.is_empty() {
        (entrypoint.to_vec(), expanded(args))
    } else {
        (entrypoint.to_vec(), cmd.to_vec())
    };
    program.extend(rest);
    program
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn variables() -> BTreeMap<String, String> {
        BTreeMap::from([
            ("A".to_owned(), "1".to_owned()),
            ("B".to_owned(), "$(A)".to_owned()),
        ])
    }

    #[test]
    fn expansion() {
        for (text, expected) in [
            ("$(A)", "1"),
            ("x$(A)y$(A)", "x1y1"),
            ("$(B)", "$(A)"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$1"),
            ("$(NONE)", "$(NONE)"),
            ("$(A", "$(A"),
            ("$A $", "$A $"),
            ("", ""),
        ] {
            assert_eq!(expand(text, &variables()), expected, "{text}");
        }
    }

    #[test]
    fn overrides() {
        let s = |items: &[&str]| items.iter().map(|&i| i.to_owned()).collect::<Vec<_>>();
        let get = |command: &[&str], args: &[&str]| {
            arguments(
                &s(command),
                &s(args),
                &s(&["entry"]),
                &s(&["cmd"]),
                &variables(),
            )
        };
        assert_eq!(get(&[], &[]), ["entry", "cmd"]);
        assert_eq!(get(&["c"], &[]), ["c"]);
        assert_eq!(get(&[], &["$(A)"]), ["entry", "1"]);
        assert_eq!(get(&["c"], &["a"]), ["c", "a"]);
    }

    proptest! {
        #[test]
        fn without_a_dollar_nothing_changes(text in "[^$]{0,40}") {
            prop_assert_eq!(expand(&text, &variables()), text);
        }

        #[test]
        fn any_text_expands(text in "[$()AB]{0,40}") {
            let _expanded = expand(&text, &variables());
        }
    }
}
