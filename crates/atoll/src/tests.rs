//! Arguments as people write them.

use super::*;

const ID: &str = "7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11";

fn parse(line: &str) -> Result<Atoll, clap::Error> {
    Atoll::try_parse_from(line.split(' ').map(|word| word.replace("ID", ID)))
}

#[test]
fn the_command_line_is_well_formed() {
    Atoll::command().debug_assert();
}

#[test]
fn what_the_help_shows_can_be_written() {
    for line in [
        "atoll serve --listen 0.0.0.0:8080 --database postgres://atoll@db/atoll",
        "atoll serve --egress-allow 10.1.2.3/32:5432 --egress-allow 10.2.0.0/16",
        "atoll prepare --pool /srv/atoll",
        "atoll sweep --dry-run",
        "atoll doctor --pool /srv/atoll --json",
        "atoll sweep --data-dir /srv/atoll/server --database postgres://atoll@db/atoll",
        "atoll demo --output /tmp/x.png",
        "atoll sandbox create --template code-interpreter --ttl 600 --metadata job=7 --env A=b --env HOME",
        "atoll sandbox create --egress none --allow 203.0.113.5:443 --deny 198.51.100.0/24 --rate-limit-mbit 20",
        "atoll sandbox network ID --egress internet --no-allow --deny 203.0.113.5",
        "atoll sandbox list --status running --metadata job=7 --json",
        "atoll sandbox exec ID --timeout 1.5 --cwd /tmp --user panda -i -- sh -c --json",
        "atoll sandbox delete ID ID",
        "atoll sandbox create --from-snapshot ID --ttl 60 --volume data --volume models:/models:ro",
        "atoll sandbox pause ID ID",
        "atoll sandbox resume ID",
        "atoll sandbox hibernate ID",
        "atoll sandbox wake ID",
        "atoll sandbox fork ID --count 3 --metadata job=7",
        "atoll snapshot create ID --name before",
        "atoll snapshot list --sandbox ID --json",
        "atoll snapshot get ID",
        "atoll snapshot delete ID ID",
        "atoll volume create data --size-mb 1024",
        "atoll volume list",
        "atoll volume get data",
        "atoll volume grow ID --size-mb 2048",
        "atoll volume clone data copy",
        "atoll volume delete data copy",
        "atoll cp - ID:/tmp/project.tgz",
        "atoll logs ID --follow --stream stderr",
        "atoll template build geo geo.toml --detach",
        "atoll --url http://host --key k key create --label ci --scope read --expires-in-days 90",
        "atoll key revoke atl_abc",
        "atoll key create --local --account ada",
        "atoll account create ada --plan free --database postgres://atoll@db/atoll",
        "atoll account list --json",
        "atoll account get ada",
        "atoll account set-plan ada team --settings /etc/atoll.toml",
        "atoll account set-plan ada",
        "atoll account delete ada",
        "atoll usage --from 2026-11-01T00:00:00Z --to 2026-12-01T00:00:00+01:00",
        "atoll usage --local --account ada",
        "atoll version --json",
    ] {
        assert!(
            parse(line).is_ok(),
            "{line}: {:?}",
            parse(line).err().map(|error| error.to_string())
        );
    }
}

#[test]
fn what_makes_no_sense_is_refused_before_the_server_is_asked() {
    for line in [
        "atoll",
        "atoll sandbox exec ID",
        "atoll sandbox exec not-an-id -- true",
        "atoll sandbox exec ID --timeout 0 -- true",
        "atoll sandbox create --ttl 5 --persistent",
        "atoll sandbox create --metadata job",
        "atoll sandbox create --cpu two",
        "atoll sandbox delete",
        "atoll sandbox create --from-snapshot ID --template base",
        "atoll sandbox create --from-snapshot ID --cpu 2",
        "atoll sandbox create --from-snapshot yesterday",
        "atoll sandbox create --volume data:relative",
        "atoll sandbox hibernate",
        "atoll sandbox fork ID --count 0",
        "atoll sandbox fork ID --count 17",
        "atoll snapshot create",
        "atoll snapshot delete",
        "atoll volume create",
        "atoll volume create ../x",
        "atoll volume create data --size-mb 0",
        "atoll volume grow data",
        "atoll volume clone data",
        "atoll cp a:b ID:/x",
        "atoll template get ../x",
        "atoll key create --expires-in-days 0",
        "atoll key create --account ada",
        "atoll account create ../ada",
        "atoll usage --from yesterday",
        "atoll usage --account ada",
        "atoll serve --listen nowhere",
    ] {
        assert!(parse(line).is_err(), "{line}");
    }
}

#[test]
fn what_follows_the_dashes_belongs_to_the_command() {
    let Ok(Atoll { connection, .. }) = parse("atoll sandbox exec ID -- ls --json --url x") else {
        panic!("refused")
    };
    assert!(!connection.json && connection.url != "x");
}

#[test]
fn a_key_in_the_environment_is_never_shown() {
    // Help shows `[env: NAME=VALUE]` unless told otherwise.
    for secret in ["key", "database"] {
        let mut commands = vec![Atoll::command()];
        while let Some(command) = commands.pop() {
            // An argument of the same name that comes from nowhere else tells nothing.
            let mut secrets = command
                .get_arguments()
                .filter(|argument| argument.get_id() == secret && argument.get_env().is_some());
            assert!(
                secrets.all(clap::Arg::is_hide_env_values_set),
                "{secret} of {}",
                command.get_name()
            );
            commands.extend(command.get_subcommands().cloned());
        }
    }
}
