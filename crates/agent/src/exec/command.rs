//! From a request to what the kernel is given: program, arguments, environment, user, directory.

use std::ffi::CString;
use std::os::fd::OwnedFd;

use protocol::message::{Command, ErrorCode, ExecStart, Failure, PathBytes, TerminalOpen};
use rustix::fs::{Access, MemfdFlags, access, memfd_create};

use crate::failure::{failed, refuse, shown};
use crate::files::path;
use crate::users::{Accounts, User};

pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Linux's `MAX_ARG_STRLEN`: longer arguments are refused by execve.
const LONGEST_ARGUMENT: usize = 128 << 10;
/// The descriptor on which the shell finds a script that is too long for an argument. One digit: `dash` knows no others.
pub(crate) const SCRIPT: i32 = 9;
/// Reads the script, which then closes the descriptor itself.
const READ_SCRIPT: &[u8] = b". /proc/self/fd/9";
const CLOSE_SCRIPT: &[u8] = b"exec 9<&-; ";

/// All that [`super::spawn`] needs, with nothing left to look up or to allocate.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Tried one after another, as a shell does along the PATH.
    pub(crate) programs: Vec<CString>,
    pub(crate) arguments: Vec<CString>,
    pub(crate) environment: Vec<CString>,
    pub(crate) directory: CString,
    /// `/` is as good where the directory (a home that nobody made) is missing.
    pub(crate) any_directory: bool,
    /// `None`: root, as we are.
    pub(crate) user: Option<User>,
    pub(crate) user_name: String,
    pub(crate) script: Option<OwnedFd>,
    /// The directory or program may lie on a file system that never answers: not to be waited for by the main loop.
    pub(crate) may_hang: bool,
}

/// What is to run, and where, and as whom.
pub(crate) struct Wanted<'a> {
    /// `None`: the user's login shell.
    pub(crate) command: Option<&'a Command>,
    pub(crate) working_directory: Option<&'a PathBytes>,
    pub(crate) environment: &'a [(String, String)],
    pub(crate) user: Option<&'a str>,
}

impl<'a> Wanted<'a> {
    pub(crate) fn of_exec(request: &'a ExecStart) -> Self {
        Self {
            command: Some(&request.command),
            working_directory: request.working_directory.as_ref(),
            environment: &request.environment,
            user: request.user.as_deref(),
        }
    }

    pub(crate) fn of_terminal(request: &'a TerminalOpen) -> Self {
        Self {
            command: request.command.as_ref(),
            working_directory: request.working_directory.as_ref(),
            environment: &request.environment,
            user: request.user.as_deref(),
        }
    }
}

pub(crate) fn plan(request: &Wanted<'_>) -> Result<Plan, Failure> {
    let user = match request.user {
        // Most commands: no file has to be read.
        None | Some("" | "root" | "0") if request.command.is_some() => None,
        None | Some("") => Some(Accounts::read().find("root")?),
        Some(user) => Some(Accounts::read().find(user)?),
    };
    let (home, name) =
        user.as_ref().map_or((&b"/root"[..], "root"), |user| (&user.home[..], &user.name[..]));
    let login_shell = user.as_ref().map_or("", |user| &user.shell);
    let (directory, any_directory) = match &request.working_directory {
        Some(directory) => (path::resolve(directory)?, false),
        None => (home.to_vec(), true),
    };
    let mut environment = environment(request.environment, home, name)?;
    let login = match request.command {
        Some(_) => None,
        None => Some(login(login_shell)?),
    };
    if let Some((program, _)) = &login
        && !request.environment.iter().any(|(name, _)| name == "SHELL")
    {
        environment.push(text([b"SHELL=", program.to_bytes()].concat(), "SHELL")?);
    }
    let name = name.to_owned();
    let mut plan = Plan {
        programs: Vec::new(),
        arguments: Vec::new(),
        environment,
        directory: text(directory, "the working directory")?,
        any_directory,
        may_hang: !any_directory,
        user: user.filter(|user| user.uid != 0 || user.gid != 0 || user.groups != [0]),
        script: None,
        user_name: name,
    };
    let Some(command) = request.command else {
        let (program, shell_name) = login.expect("there is one where no command is");
        plan.programs.push(program);
        plan.arguments.push(shell_name);
        plan.may_hang = true;
        return Ok(plan);
    };
    match command {
        Command::Script(script) => {
            let (program, shell_name) = shell().ok_or_else(no_shell)?;
            plan.programs.push(program);
            plan.arguments.push(shell_name);
            plan.arguments.push(c"-c".to_owned());
            if script.len() < LONGEST_ARGUMENT {
                plan.arguments.push(text(script.to_vec(), "the command")?);
            } else {
                plan.arguments.push(CString::new(READ_SCRIPT).expect("a constant without NUL"));
                plan.script = Some(hand_over(script)?);
            }
        }
        Command::Arguments(arguments) => {
            for argument in arguments {
                plan.arguments.push(text(argument.to_vec(), "an argument")?);
            }
            let Some(first) = arguments.first().filter(|first| !first.is_empty()) else {
                return Err(refuse(
                    ErrorCode::Invalid,
                    "the command is empty; its first argument names the program",
                ));
            };
            if first.contains(&b'/') {
                plan.programs.push(text(first.to_vec(), "the program")?);
                plan.may_hang = true;
            } else {
                let given = request.environment.iter().rev().find(|(name, _)| name == "PATH");
                let search = given.map_or(PATH, |(_, value)| value.as_str());
                for directory in search.split(':') {
                    let directory = if directory.is_empty() { "." } else { directory };
                    plan.programs.push(text(path::join(directory.as_bytes(), first), "PATH")?);
                }
                plan.may_hang |= given.is_some();
            }
        }
    }
    Ok(plan)
}

fn no_shell() -> Failure {
    let message = "this sandbox has no shell (bash or sh); give the command as arguments";
    refuse(ErrorCode::Invalid, message)
}

/// Path and name of the shell that a user gets at a login: theirs if there is such a program, else one for scripts. By the
/// dash it knows that it is one.
fn login(theirs: &str) -> Result<(CString, CString), Failure> {
    let named =
        Some(theirs).filter(|path| path.starts_with('/') && access(*path, Access::EXEC_OK).is_ok());
    let program = match named {
        Some(path) => text(path.as_bytes().to_vec(), "the login shell")?,
        None => shell().ok_or_else(no_shell)?.0,
    };
    let path = program.to_bytes();
    let name = &path[path.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1)..];
    let name = text([b"-", name].concat(), "the login shell")?;
    Ok((program, name))
}

/// Path and name of the shell for scripts.
fn shell() -> Option<(CString, CString)> {
    for name in ["bash", "sh"] {
        for directory in PATH.split(':') {
            let program = format!("{directory}/{name}");
            if access(program.as_str(), Access::EXEC_OK).is_ok() {
                return Some((CString::new(program).ok()?, CString::new(name).ok()?));
            }
        }
    }
    None
}

/// A file in memory with the script.
fn hand_over(script: &[u8]) -> Result<OwnedFd, Failure> {
    let file = memfd_create(c"script", MemfdFlags::CLOEXEC)
        .map_err(|error| failed("keep the script in", b"memory", error))?;
    let mut file = std::fs::File::from(file);
    // On the script's first line, so that the shell counts lines as the user does.
    std::io::Write::write_all(&mut file, &[CLOSE_SCRIPT, script].concat())
        .map_err(|error| refuse(ErrorCode::Busy, format!("keep the script in memory: {error}")))?;
    Ok(file.into())
}

fn environment(
    given: &[(String, String)],
    home: &[u8],
    user: &str,
) -> Result<Vec<CString>, Failure> {
    let defaults = [
        ("HOME", home),
        ("PATH", PATH.as_bytes()),
        ("LANG", b"C.UTF-8"),
        ("USER", user.as_bytes()),
        ("LOGNAME", user.as_bytes()),
    ];
    let mut environment = Vec::with_capacity(defaults.len() + given.len());
    for (name, value) in defaults {
        if !given.iter().any(|(given, _)| given == name) {
            environment.push(text([name.as_bytes(), b"=", value].concat(), name)?);
        }
    }
    for (at, (name, value)) in given.iter().enumerate() {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(refuse(ErrorCode::Invalid, format!("{name:?} is no name for a variable")));
        }
        if name.len() + value.len() + 2 > LONGEST_ARGUMENT {
            return Err(refuse(
                ErrorCode::TooLarge,
                format!("the variable {name} is longer than 128 KiB; use a file"),
            ));
        }
        // The last of the same name counts, as in `env A=1 A=2`.
        if !given[at + 1..].iter().any(|(later, _)| later == name) {
            environment.push(text([name.as_bytes(), b"=", value.as_bytes()].concat(), name)?);
        }
    }
    Ok(environment)
}

fn text(bytes: Vec<u8>, what: &str) -> Result<CString, Failure> {
    CString::new(bytes)
        .map_err(|_| refuse(ErrorCode::Invalid, format!("{what} cannot hold a NUL byte")))
}

impl Plan {
    /// The kernel found neither a binary nor `#!`: as shells do, it is run as a script of `sh`.
    pub(crate) fn as_script(&mut self, program: usize) {
        let program = self.programs.swap_remove(program);
        self.programs = vec![c"/bin/sh".to_owned()];
        self.arguments.splice(..1, [c"sh".to_owned(), program]);
    }

    pub(crate) fn program_shown(&self) -> String {
        shown(self.arguments.first().map_or(b"", |name| name.to_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(command: Command) -> ExecStart {
        ExecStart {
            id: "a".to_owned(),
            command,
            working_directory: None,
            environment: vec![
                ("A".to_owned(), "1".to_owned()),
                ("A".to_owned(), "two\n'\"$".to_owned()),
            ],
            user: None,
            has_stdin: false,
            timeout_ms: 0,
            output_limit: 1,
        }
    }

    fn planned(request: &ExecStart) -> Result<Plan, Failure> {
        plan(&Wanted::of_exec(request))
    }

    #[test]
    fn a_login_shell_is_the_users_if_there_is_one_and_knows_what_it_is() {
        let login = |theirs| {
            login(theirs)
                .map(|(program, name)| {
                    (program.into_string().unwrap(), name.into_string().unwrap())
                })
                .unwrap()
        };
        assert_eq!(login("/bin/sh"), ("/bin/sh".to_owned(), "-sh".to_owned()));
        for none in ["", "/bin/no-such-shell", "sh"] {
            let (program, name) = login(none);
            assert_eq!(Some(&name[1..]), program.rsplit('/').next());
        }
    }

    fn script(bytes: &[u8]) -> Command {
        Command::Script(bytes.to_vec().into())
    }

    #[test]
    fn the_last_value_of_a_variable_counts_and_defaults_give_way() {
        let mut request = request(script(b"true"));
        request.environment.push(("HOME".to_owned(), "/h".to_owned()));
        let plan = planned(&request).unwrap();
        let all: Vec<_> = plan.environment.iter().map(|variable| variable.to_bytes()).collect();
        assert!(all.contains(&&b"A=two\n'\"$"[..]) && all.contains(&&b"HOME=/h"[..]));
        assert_eq!(
            all.iter().filter(|one| one.starts_with(b"A=") || one.starts_with(b"HOME=")).count(),
            2
        );
    }

    #[test]
    fn only_a_script_that_fits_no_argument_is_handed_over_as_a_file() {
        assert!(planned(&request(script(&[b'#'; LONGEST_ARGUMENT - 1]))).unwrap().script.is_none());
        assert!(planned(&request(script(&[b'#'; LONGEST_ARGUMENT]))).unwrap().script.is_some());
    }

    #[test]
    fn what_the_kernel_could_not_be_given_is_refused() {
        let mut nameless = request(script(b"true"));
        nameless.environment.push((String::new(), String::new()));
        for bad in [request(script(b"a\0b")), request(Command::Arguments(Vec::new())), nameless] {
            assert_eq!(planned(&bad).unwrap_err().code, ErrorCode::Invalid);
        }
    }
}
