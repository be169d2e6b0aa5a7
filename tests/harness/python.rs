//! Packages of PyPI for tests, each list in an environment of its own below the target directory.

use std::{fs, path::PathBuf, time::Duration};

use tokio::process::Command;

use crate::program::target_directory;

const INSTALL_DEADLINE: Duration = Duration::from_secs(240);

/// The Python that has the packages of `tests/NAME.txt`.
///
/// # Panics
/// They cannot be had.
pub async fn python_with(name: &str) -> PathBuf {
    let list = concat!(env!("CARGO_MANIFEST_DIR"), "/").to_owned() + name + ".txt";
    let place = target_directory().join("test-python").join(name);
    let (python, installed) = (place.join("bin/python"), place.join("packages"));
    let wanted = fs::read(&list).expect("the list is in the repository");
    if !fs::read(&installed).is_ok_and(|installed| installed == wanted) {
        let place = place.to_str().expect("the target directory's name is text");
        run(Command::new("python3").args(["-m", "venv", "--clear", place])).await;
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", &list];
        run(Command::new(&python).args(pip)).await;
        fs::write(&installed, wanted).expect("the target directory can be written");
    }
    python
}

/// The package itself, without what it needs: for a guest that has the rest.
///
/// # Panics
/// It cannot be had.
pub async fn wheel_of(name: &str, version: &str) -> Vec<u8> {
    let place = target_directory().join("test-python").join("wheels");
    let file = place.join(format!("{name}-{version}-py2.py3-none-any.whl"));
    if !file.exists() {
        let directory = place.to_str().expect("the target directory's name is text");
        let pip = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"];
        let wanted = format!("{name}=={version}");
        run(Command::new("python3").args(pip).args(["--dest", directory, &wanted])).await;
    }
    fs::read(file).expect("the package is there")
}

async fn run(command: &mut Command) {
    let output = tokio::time::timeout(INSTALL_DEADLINE, command.kill_on_drop(true).output()).await;
    let output = output.expect("packages come in time").expect("the program can be started");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
}
