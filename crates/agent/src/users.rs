//! Who a command runs as and who owns a file: `/etc/passwd` and `/etc/group`, read anew each time because users change.

use std::io::Read;

use protocol::message::{ErrorCode, Failure};

use crate::failure::refuse;

/// More than any sane account file; a larger one is read up to here.
const LONGEST: u64 = 4 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
    pub(crate) name: String,
    pub(crate) home: Vec<u8>,
    /// Of a login; empty: none is named.
    pub(crate) shell: String,
}

/// Both files' text, so that rules can be tested without them.
pub(crate) struct Accounts {
    passwd: String,
    group: String,
}

impl Accounts {
    /// A root file system without these files has only users by number.
    pub(crate) fn read() -> Self {
        Self { passwd: text("/etc/passwd"), group: text("/etc/group") }
    }

    /// `user` or `user:group`, each a name or a number.
    pub(crate) fn find(&self, wanted: &str) -> Result<User, Failure> {
        let (name, group) = match wanted.split_once(':') {
            Some((name, group)) => (name, Some(group)),
            None => (wanted, None),
        };
        let mut user = self.user(name)?;
        if let Some(group) = group {
            user.gid = self.group_id(group)?;
            user.groups = vec![user.gid];
        }
        Ok(user)
    }

    fn user(&self, wanted: &str) -> Result<User, Failure> {
        let number = wanted.parse::<u32>().ok();
        for line in self.passwd.lines() {
            let mut fields = line.split(':');
            let (Some(name), Some(_), Some(uid), Some(gid), Some(_), Some(home)) = (
                fields.next(),
                fields.next(),
                fields.next(),
                fields.next(),
                fields.next(),
                fields.next(),
            ) else {
                continue;
            };
            let (Ok(uid), Ok(gid)) = (uid.parse(), gid.parse()) else { continue };
            if name == wanted || number == Some(uid) {
                let home = if home.is_empty() { "/" } else { home };
                let shell = fields.next().unwrap_or_default().to_owned();
                let groups = self.groups_of(name, gid);
                let (name, home) = (name.to_owned(), home.into());
                return Ok(User { uid, gid, groups, name, home, shell });
            }
        }
        // u32::MAX means "leave as it is" to the system calls.
        match number.filter(|&number| number != u32::MAX) {
            Some(0) => Ok(User {
                uid: 0,
                gid: 0,
                groups: vec![0],
                name: "root".to_owned(),
                home: b"/root".to_vec(),
                shell: String::new(),
            }),
            Some(uid) => Ok(User {
                uid,
                gid: uid,
                groups: vec![uid],
                name: wanted.to_owned(),
                home: b"/".to_vec(),
                shell: String::new(),
            }),
            None if wanted == "root" => self.user("0"),
            None => Err(refuse(
                ErrorCode::Invalid,
                format!("there is no user {wanted:?} in this sandbox"),
            )),
        }
    }

    fn group_id(&self, wanted: &str) -> Result<u32, Failure> {
        let named = self.groups().find(|(name, ..)| *name == wanted).map(|(_, gid, _)| gid);
        named
            .or_else(|| wanted.parse().ok().filter(|&number| number != u32::MAX))
            .or_else(|| (wanted == "root").then_some(0))
            .ok_or_else(|| {
                refuse(ErrorCode::Invalid, format!("there is no group {wanted:?} in this sandbox"))
            })
    }

    fn groups_of(&self, user: &str, primary: u32) -> Vec<u32> {
        let mut groups = vec![primary];
        for (_, gid, members) in self.groups() {
            if gid != primary && members.split(',').any(|member| member == user) {
                groups.push(gid);
            }
        }
        groups
    }

    fn groups(&self) -> impl Iterator<Item = (&str, u32, &str)> {
        self.group.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let (name, _, gid, members) =
                (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
            Some((name, gid.parse().ok()?, members))
        })
    }
}

fn text(path: &str) -> String {
    let mut bytes = Vec::new();
    // A FIFO put in the file's place must not block us.
    if let Ok(file) = crate::files::open_regular(path.as_bytes()) {
        let _ = file.take(LONGEST).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accounts() -> Accounts {
        Accounts {
            passwd:
                "root:x:0:0:root:/root:/bin/sh\nbroken\npanda:x:1000:1000::/home/panda:/bin/sh\n"
                    .to_owned(),
            group: "root:x:0:\npanda:x:1000:\naudio:x:29:other,panda\nvideo:x:44:pandas\n"
                .to_owned(),
        }
    }

    #[test]
    fn a_user_is_found_by_name_and_by_number_with_all_groups() {
        let panda = accounts().find("panda").unwrap();
        assert_eq!((panda.uid, panda.gid, &panda.groups[..]), (1000, 1000, &[1000, 29][..]));
        assert_eq!(accounts().find("1000").unwrap(), panda);
    }

    #[test]
    fn a_group_that_is_asked_for_replaces_the_others() {
        let user = accounts().find("panda:video").unwrap();
        assert_eq!((user.gid, &user.groups[..]), (44, &[44][..]));
        assert_eq!(accounts().find("5:6").unwrap().gid, 6);
    }

    #[test]
    fn root_exists_without_any_file() {
        let nobody = Accounts { passwd: String::new(), group: String::new() };
        assert_eq!(nobody.find("root:root").unwrap().uid, 0);
    }

    #[test]
    fn an_unknown_name_is_refused() {
        assert_eq!(accounts().find("ghost").unwrap_err().code, ErrorCode::Invalid);
        assert_eq!(accounts().find("panda:ghosts").unwrap_err().code, ErrorCode::Invalid);
        assert_eq!(accounts().find("4294967295").unwrap_err().code, ErrorCode::Invalid);
    }
}
