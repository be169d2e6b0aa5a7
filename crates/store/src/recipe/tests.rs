//! What a recipe may say.

use proptest::prelude::*;

use super::*;

fn problems(text: &str) -> Vec<String> {
    match Recipe::parse(text) {
        Err(Error::InvalidRecipe { problems }) => problems,
        other => panic!("{text:?} gave {other:?}"),
    }
}

fn none(_: &TemplateName) -> Option<Recipe> {
    None
}

#[test]
fn the_recipes_that_come_with_atoll_resolve() {
    for (name, recipe) in builtin() {
        let resolved = recipe.resolve(&find_builtin).unwrap();
        let expected =
            if name.as_str() == "postgres" { (1, 1024, 2048) } else { (2, 2048, 10_240) };
        assert_eq!((resolved.cpu(), resolved.memory_mb(), resolved.disk_mb()), expected);
    }
    let ubuntu = find_builtin(&"ubuntu-24.04".parse().unwrap());
    assert_eq!(ubuntu, find_builtin(&"base".parse().unwrap()));
    assert!(ubuntu.is_some());
}

#[test]
fn every_bad_field_is_named() {
    let text = r#"
        suite = "no suite"
        cpu = 0
        memory_mb = 1
        packages = ["--force", "python3", "./x.deb", "bash-"]
        users = [{ name = "Root" }]
        directories = [{ path = "/a/../b" }, { path = "/etc" }]
        links = [{ path = "relative", target = "" }]
        files = [{ path = "/etc", content = "" }]
    "#;
    let problems = problems(text).join("\n");
    for part in [
        "no suite",
        "cpu is 0",
        "memory_mb",
        "--force",
        "./x.deb",
        "bash-",
        "Root",
        "/a/../b",
        "relative",
        "/etc` is there twice",
    ] {
        assert!(problems.contains(part), "{part} is missing in {problems}");
    }
    assert!(!problems.contains("python3"));
}

#[test]
fn an_unknown_field_is_refused() {
    assert!(problems("run = \"rm -rf /\"")[0].contains("run"));
    assert!(problems("users = [{ name = \"a\", uid = 3 }]")[0].contains("uid"));
}

#[test]
fn modes_and_owners_are_texts_of_their_form() {
    for bad in [
        "mode = \"888\"",
        "mode = \"7\"",
        "mode = \"+755\"",
        "owner = \"a b\"",
        "owner = \"\"",
        "owner = \"1:2:3\"",
    ] {
        problems(&format!("directories = [{{ path = \"/x\", {bad} }}]"));
    }
}

#[test]
fn a_recipe_cannot_start_from_itself_or_from_nothing() {
    let recipe = Recipe::parse("from = \"x\"").unwrap();
    assert!(matches!(recipe.resolve(&none), Err(Error::InvalidRecipe { .. })));
    assert!(matches!(recipe.resolve(&|_| Some(recipe.clone())), Err(Error::InvalidRecipe { .. })));
}

#[test]
fn sizes_come_from_the_nearest_recipe_that_names_them() {
    let base = Recipe::parse("cpu = 4\nmemory_mb = 512").unwrap();
    let recipe = Recipe::parse("from = \"base\"\nmemory_mb = 1024").unwrap();
    let resolved = recipe.resolve(&|_| Some(base.clone())).unwrap();
    assert_eq!(
        (resolved.cpu(), resolved.memory_mb(), resolved.disk_mb()),
        (4, 1024, DEFAULT_DISK_MB)
    );
    assert_eq!(resolved.parent().unwrap().digest(), base.resolve(&none).unwrap().digest());
}

#[test]
fn the_digest_follows_the_tree_and_not_the_words() {
    let digest = |text: &str| Recipe::parse(text).unwrap().resolve(&none).unwrap().digest();
    let plain = digest("packages = [\"curl\"]");
    assert_eq!(
        plain,
        digest("label = \"L\"\ndescription = \"D\"\naliases = [\"a\"]\npackages = [\"curl\"]")
    );
    for other in [
        "",
        "packages = [\"wget\"]",
        "packages = [\"curl\"]\ndisk_mb = 4096",
        "suite = \"sid\"\npackages = [\"curl\"]",
    ] {
        assert_ne!(plain, digest(other), "{other}");
    }
    // Written down so that a change of serialization cannot silently rebuild everybody's templates.
    assert_eq!(plain.as_str(), "c06328525c2592ce75683f0583684286f078b803ac09ab2d44427b66ec2f31a4");
}

proptest! {
    #[test]
    fn a_path_that_passes_stays_below_the_root(path in "[/a.]{0,12}|\\PC{0,20}") {
        if is_clean_path(&path) {
            prop_assert!(path.len() > 1);
            prop_assert!(Path::new(&path).components().skip(1).all(|c| matches!(c, std::path::Component::Normal(_))));
        }
    }
}
