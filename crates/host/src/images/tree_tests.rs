//! The rules of layers, and that no path leaves the image.

use super::*;
use proptest::prelude::*;

fn file(layer: usize, number: usize) -> Entry {
    Entry::Node(Node::File(Meta::default(), (layer, number)))
}

fn directory() -> Entry {
    Entry::Node(Node::Directory(Meta::default()))
}

fn symlink(target: &str) -> Entry {
    Entry::Node(Node::Symlink(Meta::default(), target.into()))
}

fn tree(entries: &[(usize, &str, Entry)]) -> Tree {
    let mut tree = Tree::default();
    for (layer, path, entry) in entries {
        tree.apply(*layer, path.as_bytes(), entry.clone())
            .expect(path);
    }
    tree
}

fn paths(tree: &Tree) -> Vec<String> {
    tree.nodes()
        .map(|(path, _)| String::from_utf8_lossy(path).into_owned())
        .collect()
}

#[test]
fn a_whiteout_hides_what_is_below_only() {
    let tree = tree(&[
        (0, "a/old", file(0, 0)),
        (0, "a/both", file(0, 1)),
        (0, "b/c/d", file(0, 2)),
        (0, "bc", file(0, 3)),
        (1, "a/both", file(1, 0)),
        (1, "a/.wh.old", file(1, 1)),
        (1, "a/.wh.both", file(1, 2)),
        (1, ".wh.b", file(1, 3)),
        (1, ".wh.never-there", file(1, 4)),
    ]);
    assert_eq!(paths(&tree), ["a", "a/both", "bc"]);
}

#[test]
fn an_opaque_directory_keeps_what_its_own_layer_has() {
    let tree = tree(&[
        (0, "a/old", file(0, 0)),
        (0, "a/deep/old", file(0, 1)),
        (1, "a/deep/new", file(1, 0)),
        (1, "a/new", file(1, 1)),
        (1, "a/.wh..wh..opq", file(1, 2)),
    ]);
    assert_eq!(paths(&tree), ["a", "a/deep", "a/deep/new", "a/new"]);
}

#[test]
fn kinds_replace_each_other() {
    let tree = tree(&[
        (0, "a/x", file(0, 0)),
        (1, "a", file(1, 0)),
        (0, "b", file(0, 1)),
        (1, "b", directory()),
        (0, "c/x", file(0, 2)),
        (1, "c", directory()),
    ]);
    assert_eq!(paths(&tree), ["a", "b", "c", "c/x"]);
}

#[test]
fn paths_go_through_links_but_not_out() {
    let tree = tree(&[
        (0, "usr/lib", directory()),
        (0, "lib", symlink("usr/lib")),
        (0, "up", symlink("../../..")),
        (0, "abs", symlink("/usr")),
        (1, "lib/x", file(1, 0)),
        (1, "up/y", file(1, 1)),
        (1, "abs/lib/z", file(1, 2)),
    ]);
    let files: Vec<_> = paths(&tree)
        .into_iter()
        .filter(|p| p.ends_with(['x', 'y', 'z']))
        .collect();
    assert_eq!(files, ["usr/lib/x", "usr/lib/z", "y"]);
}

#[test]
fn a_hard_link_keeps_the_content_that_it_was_made_to() {
    let mut tree = tree(&[
        (0, "a", file(0, 0)),
        (0, "b", Entry::HardLink("./a".into(), Meta::default())),
        (1, "a", file(1, 0)),
    ]);
    let contents: Vec<_> = tree
        .nodes()
        .map(|(_, node)| match node {
            Node::File(_, content) => *content,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(contents, [(1, 0), (0, 0)]);
    for bad in ["none", "", "../a", "/"] {
        assert!(
            tree.apply(1, b"c", Entry::HardLink(bad.into(), Meta::default()))
                .is_err(),
            "{bad}"
        );
    }
}

#[test]
fn hostile_paths_are_refused() {
    let mut tree = tree(&[(0, "file", file(0, 0)), (0, "loop", symlink("loop"))]);
    let long = "a/".repeat(2100);
    let name = "a".repeat(256);
    for bad in [
        "../x",
        "a/../../x",
        "file/x",
        "loop/x",
        "a\0b",
        &long,
        &name,
        ".wh.",
        ".wh..",
        ".wh...",
    ] {
        assert!(
            tree.apply(1, bad.as_bytes(), file(1, 0)).is_err(),
            "{bad:?}"
        );
    }
    assert!(tree.apply(1, b"/absolute/x", file(1, 0)).is_ok());
}

proptest! {
    /// Whatever the layers hold, every path lies inside, and in directories that exist.
    #[test]
    fn every_path_lies_inside(entries in prop::collection::vec((0usize..3, "[./abw]{0,9}|\\.wh\\.[ab.]{0,3}", 0u8..4, "[./ab]{0,6}"), 0..40)) {
        let mut tree = Tree::default();
        let mut sorted = entries;
        sorted.sort_by_key(|(layer, ..)| *layer);
        for (number, (layer, path, kind, target)) in sorted.into_iter().enumerate() {
            let entry = match kind {
                0 => directory(),
                1 => symlink(&target),
                2 => Entry::HardLink(target.into_bytes(), Meta::default()),
                _ => file(layer, number),
            };
            // Refusals are as good here.
            let _accepted = tree.apply(layer, path.as_bytes(), entry).is_ok();
        }
        for path in paths(&tree) {
            let parts: Vec<_> = path.split('/').collect();
            prop_assert!(parts.iter().all(|part| !part.is_empty() && *part != "." && *part != ".."), "{path}");
            if let Some((parent, _)) = path.rsplit_once('/') {
                prop_assert!(tree.is_directory(parent.as_bytes()), "{path}");
            }
        }
    }
}
