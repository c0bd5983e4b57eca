//! Patterns in which a star is any number of characters: those of profile selectors, and the walk
//! that every such pattern shares.

/// Whether the pattern covers the whole text: `*` is any number of characters, `?` exactly one.
pub fn matches(pattern: &str, text: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let text: Vec<char> = text.chars().collect();
    covers(
        &pattern,
        &text,
        |&token| token == '*',
        |&token, &c| token == '?' || token == c,
    )
}

/// Whether everything that the inner pattern covers the outer one covers too. May miss rare cases, in
/// which several stars of the outer share what a star of the inner stands for.
pub fn contains(outer: &str, inner: &str) -> bool {
    let outer: Vec<char> = outer.chars().collect();
    let inner: Vec<char> = inner.chars().collect();
    // A star of the inner stands for texts of any length, so only a star can take it.
    covers(
        &outer,
        &inner,
        |&token| token == '*',
        |&token, &c| c != '*' && (token == '?' || token == c),
    )
}

/// Whether tokens cover a whole text, in quadratic time at most. What is no star takes one element.
pub(crate) fn covers<T, C>(
    tokens: &[T],
    text: &[C],
    is_star: impl Fn(&T) -> bool,
    takes: impl Fn(&T, &C) -> bool,
) -> bool {
    let (mut p, mut t) = (0, 0);
    // Where to go on if what follows the last star does not match: one element later.
    let mut retry: Option<(usize, usize)> = None;
    while t < text.len() {
        match tokens.get(p) {
            Some(token) if is_star(token) => {
                retry = Some((p + 1, t));
                p += 1;
            }
            Some(token) if takes(token, &text[t]) => {
                p += 1;
                t += 1;
            }
            Some(_) | None => match retry {
                Some((after_star, from)) => {
                    p = after_star;
                    t = from + 1;
                    retry = Some((after_star, t));
                }
                None => return false,
            },
        }
    }
    tokens[p..].iter().all(is_star)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, letter by letter.
    fn by_definition(pattern: &[char], text: &[char]) -> bool {
        match pattern.split_first() {
            None => text.is_empty(),
            Some(('*', rest)) => (0..=text.len()).any(|n| by_definition(rest, &text[n..])),
            Some((c, rest)) => text.split_first().is_some_and(|(first, others)| {
                (*c == '?' || c == first) && by_definition(rest, others)
            }),
        }
    }

    proptest! {
        #[test]
        fn agrees_with_the_definition(pattern in "[ab*?]{0,8}", text in "[ab]{0,8}") {
            let (p, t): (Vec<_>, Vec<_>) = (pattern.chars().collect(), text.chars().collect());
            prop_assert_eq!(matches(&pattern, &text), by_definition(&p, &t));
        }

        #[test]
        fn what_contains_a_pattern_covers_all_that_it_covers(outer in "[ab*?]{0,5}", inner in "[ab*?]{0,5}", text in "[ab]{0,6}") {
            if contains(&outer, &inner) && matches(&inner, &text) {
                prop_assert!(matches(&outer, &text));
            }
            prop_assert!(contains(&inner, &inner) && contains("*", &inner));
        }
    }

    #[test]
    fn a_question_mark_needs_a_character() {
        assert!(!matches("value?", "value"));
        assert!(matches("value?", "value1"));
        assert!(matches("*prod*", "my-prod-1"));
    }
}
