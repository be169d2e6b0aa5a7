//! Commands of sandboxes: how they are written on this command line, and what they end with.

use std::process::ExitCode;

/// As `timeout` of coreutils has it.
pub(crate) const TIMED_OUT: u8 = 124;
/// Atoll failed, not the command; as docker has it.
pub(crate) const NOT_RUN: u8 = 125;

pub(crate) fn exit_code_of(code: i32) -> ExitCode {
    u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from)
}

pub(crate) fn positive(text: &str) -> Result<f64, &'static str> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds > 0.0 => Ok(seconds),
        Ok(_) | Err(_) => Err("a timeout is a number of seconds above 0"),
    }
}

/// For a shell. Several arguments reach their program as they are, whatever is in them.
pub(crate) fn script(mut command: Vec<String>) -> String {
    if command.len() == 1 {
        return command.remove(0);
    }
    command.iter().map(|argument| quoted(argument)).collect::<Vec<_>>().join(" ")
}

fn quoted(argument: &str) -> String {
    let is_plain = !argument.is_empty()
        && argument.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./:,+@%".contains(&b));
    if is_plain { argument.to_owned() } else { format!("'{}'", argument.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn arguments_pass_a_shell_unchanged(arguments in prop::collection::vec("[^\0]{0,12}", 1..5)) {
            let command = ["printf".to_owned(), "%s\\0".to_owned()].into_iter().chain(arguments.clone()).collect();
            let printed = Command::new("sh").arg("-c").arg(script(command)).output().unwrap().stdout;
            let expected: Vec<u8> = arguments.iter().flat_map(|argument| [argument.as_bytes(), b"\0"].concat()).collect();
            prop_assert_eq!(printed, expected);
        }
    }

    #[test]
    fn a_single_argument_is_a_script() {
        assert_eq!(script(vec!["ls | wc -l".to_owned()]), "ls | wc -l");
    }

    #[test]
    fn a_timeout_that_no_command_can_meet_is_refused() {
        for bad in ["0", "-1", "nan", "inf", "soon"] {
            assert!(positive(bad).is_err(), "{bad}");
        }
        assert_eq!(positive("0.5"), Ok(0.5));
    }
}
