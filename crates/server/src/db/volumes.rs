//! Rows of volumes, and who has them: the lease that keeps two writers apart.

use api::{AccountId, SandboxId, TemplateName, VolumeId, VolumeKind, VolumeName};
use sqlx::{AnyConnection, Row as _, any::AnyRow};

use super::{Db, quotas::admit, signed, unsigned};
use crate::{
    Error,
    account::{Amounts, Plan},
};

/// In place of a slot: the volume is its sandbox's root disk.
pub(crate) const ROOT_SLOT: u8 = u8::MAX;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VolumeRow {
    pub(crate) id: VolumeId,
    pub(crate) account: AccountId,
    pub(crate) name: VolumeName,
    pub(crate) kind: VolumeKind,
    pub(crate) size_bytes: u64,
    /// Milliseconds since 1970.
    pub(crate) created_at: i64,
    /// Of a root disk: what it was made from.
    pub(crate) template: Option<TemplateName>,
}

/// One sandbox's hold on one volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AttachmentRow {
    pub(crate) volume: VolumeId,
    pub(crate) sandbox: SandboxId,
    /// Index of the machine's slot, or [`ROOT_SLOT`].
    pub(crate) slot: u8,
    pub(crate) read_only: bool,
    /// Empty: only the disk is there.
    pub(crate) mount_path: String,
    /// Of the volume.
    pub(crate) name: VolumeName,
}

/// How a claim ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    Held,
    /// Another has it; nothing was claimed.
    Taken {
        volume: VolumeId,
        holder: SandboxId,
    },
    /// Deleted meanwhile; nothing was claimed.
    Gone {
        volume: VolumeId,
    },
}

const COLUMNS: &str = "id, account, name, kind, size_bytes, created_at, template";
const SELECT_ATTACHMENTS: &str = "SELECT volume, sandbox, slot, read_only, mount_path, name \
     FROM attachments JOIN volumes ON volumes.id = attachments.volume";

impl VolumeRow {
    /// What it takes of its account's.
    pub(crate) fn amounts(&self) -> Amounts {
        Amounts { volumes: 1, disk_bytes: self.size_bytes, ..Amounts::default() }
    }
}

/// False when the name is taken.
async fn insert(connection: &mut AnyConnection, row: &VolumeRow) -> Result<bool, Error> {
    let done = sqlx::query(&format!(
        "INSERT INTO volumes ({COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING"
    ))
    .bind(row.id.to_string())
    .bind(row.account.as_str())
    .bind(row.name.as_str())
    .bind(row.kind.to_string())
    .bind(signed(row.size_bytes)?)
    .bind(row.created_at)
    .bind(row.template.as_ref().map(TemplateName::as_str))
    .execute(connection)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// The root disk of a sandbox that is being made, held by it from the start.
pub(super) async fn insert_root(
    connection: &mut AnyConnection,
    row: &VolumeRow,
    sandbox: &SandboxId,
) -> Result<(), Error> {
    if !insert(connection, row).await? {
        return Err(Error::internal(format!("there is a volume {} already", row.name)));
    }
    attach(
        connection,
        &AttachmentRow {
            volume: row.id,
            sandbox: *sandbox,
            slot: ROOT_SLOT,
            read_only: false,
            mount_path: String::new(),
            name: row.name.clone(),
        },
    )
    .await
}

async fn attach(connection: &mut AnyConnection, row: &AttachmentRow) -> Result<(), Error> {
    sqlx::query(
        "INSERT INTO attachments (volume, sandbox, slot, read_only, mount_path) VALUES ($1, $2, $3, $4, $5)",
    )
    .bind(row.volume.to_string())
    .bind(row.sandbox.to_string())
    .bind(i64::from(row.slot))
    .bind(i64::from(row.read_only))
    .bind(&row.mount_path)
    .execute(connection)
    .await?;
    Ok(())
}

impl Db {
    /// False when the name is taken.
    ///
    /// # Errors
    /// The plan does not allow it.
    pub(crate) async fn insert_volume(&self, row: &VolumeRow, plan: &Plan) -> Result<bool, Error> {
        let mut transaction = self.pool().begin().await?;
        admit(&mut transaction, &row.account, plan, &row.amounts(), None).await?;
        let inserted = insert(&mut transaction, row).await?;
        self.meter_volume(&mut transaction, &row.id).await?;
        transaction.commit().await?;
        Ok(inserted)
    }

    /// Oldest first.
    pub(crate) async fn volumes(&self, account: &AccountId) -> Result<Vec<VolumeRow>, Error> {
        let rows = sqlx::query(&format!(
            "SELECT {COLUMNS} FROM volumes WHERE account = $1 ORDER BY created_at, id"
        ))
        .bind(account.as_str())
        .fetch_all(self.pool())
        .await?;
        rows.iter().map(volume).collect()
    }

    /// The same without the disks of databases, which are shown nowhere.
    pub(crate) async fn shown_volumes(&self, account: &AccountId) -> Result<Vec<VolumeRow>, Error> {
        let rows = sqlx::query(&format!(
            "SELECT {COLUMNS} FROM volumes WHERE account = $1 AND NOT (kind = 'root' AND (\
                 EXISTS (SELECT 1 FROM databases WHERE databases.id = volumes.id) \
                 OR EXISTS (SELECT 1 FROM attachments JOIN sandboxes ON sandboxes.id = attachments.sandbox \
                     WHERE attachments.volume = volumes.id AND managed = 1))) \
             ORDER BY created_at, id"
        ))
        .bind(account.as_str())
        .fetch_all(self.pool())
        .await?;
        rows.iter().map(volume).collect()
    }

    /// By id or name.
    pub(crate) async fn volume(
        &self,
        account: &AccountId,
        id_or_name: &str,
    ) -> Result<Option<VolumeRow>, Error> {
        // An id wins over another volume's name.
        let row = sqlx::query(&format!(
            "SELECT {COLUMNS} FROM volumes WHERE account = $1 AND (id = $2 OR name = $2) \
             ORDER BY CASE WHEN id = $2 THEN 0 ELSE 1 END LIMIT 1"
        ))
        .bind(account.as_str())
        .bind(id_or_name)
        .fetch_optional(self.pool())
        .await?;
        row.as_ref().map(volume).transpose()
    }

    pub(crate) async fn all_volumes(&self) -> Result<Vec<VolumeId>, Error> {
        let ids: Vec<String> =
            sqlx::query_scalar("SELECT id FROM volumes").fetch_all(self.pool()).await?;
        ids.iter().map(|id| id.parse().map_err(|_| unread("id"))).collect()
    }

    /// # Errors
    /// The plan does not allow so much more than `row` has.
    pub(crate) async fn set_volume_size(
        &self,
        row: &VolumeRow,
        bytes: u64,
        plan: &Plan,
    ) -> Result<(), Error> {
        let mut transaction = self.pool().begin().await?;
        let more = bytes.saturating_sub(row.size_bytes);
        let more = Amounts { disk_bytes: more, ..Amounts::default() };
        admit(&mut transaction, &row.account, plan, &more, None).await?;
        sqlx::query("UPDATE volumes SET size_bytes = $2 WHERE id = $1")
            .bind(row.id.to_string())
            .bind(signed(bytes)?)
            .execute(&mut *transaction)
            .await?;
        // Where it is a root disk, it is counted with the sandbox that has it.
        sqlx::query(
            "UPDATE sandboxes SET disk_mb = $2 \
             WHERE id = (SELECT sandbox FROM attachments WHERE volume = $1 AND slot = $3)",
        )
        .bind(row.id.to_string())
        .bind(signed(bytes >> 20)?)
        .bind(i64::from(ROOT_SLOT))
        .execute(&mut *transaction)
        .await?;
        self.meter_volume(&mut transaction, &row.id).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// `None`: it is gone; else who has it, then nothing happened.
    pub(crate) async fn delete_volume(&self, id: &VolumeId) -> Result<Option<SandboxId>, Error> {
        let mut transaction = self.pool().begin().await?;
        lock(&mut transaction, id).await?;
        let holder = holders(&mut transaction, id).await?.first().map(|held| held.sandbox);
        if holder.is_none() {
            sqlx::query("DELETE FROM volumes WHERE id = $1")
                .bind(id.to_string())
                .execute(&mut *transaction)
                .await?;
            self.meter_volume(&mut transaction, id).await?;
            transaction.commit().await?;
        }
        Ok(holder)
    }

    /// All of them or none: one writer, or readers alone, whoever else asks at the same moment.
    pub(crate) async fn claim_volumes(&self, wanted: &[AttachmentRow]) -> Result<Claim, Error> {
        let mut transaction = self.pool().begin().await?;
        let mut in_order: Vec<_> = wanted.iter().collect();
        // Two claims of the same volumes shall not wait for each other.
        in_order.sort_unstable_by_key(|row| row.volume);
        for row in in_order {
            if !lock(&mut transaction, &row.volume).await? {
                return Ok(Claim::Gone { volume: row.volume });
            }
            let others = holders(&mut transaction, &row.volume).await?;
            if let Some(other) = others.iter().find(|other| !(other.read_only && row.read_only)) {
                return Ok(Claim::Taken { volume: row.volume, holder: other.sandbox });
            }
            attach(&mut transaction, row).await?;
        }
        transaction.commit().await?;
        Ok(Claim::Held)
    }

    /// All but its root disk. Idempotent. Only once nothing can write to them any longer.
    pub(crate) async fn release_volumes(&self, sandbox: &SandboxId) -> Result<(), Error> {
        sqlx::query("DELETE FROM attachments WHERE sandbox = $1 AND slot <> $2")
            .bind(sandbox.to_string())
            .bind(i64::from(ROOT_SLOT))
            .execute(self.pool())
            .await?;
        Ok(())
    }

    /// One of them; those behind it move up, so that the first is always in the first slot. What the sandbox has then.
    /// Idempotent.
    pub(crate) async fn release_volume(
        &self,
        volume: &VolumeId,
        sandbox: &SandboxId,
    ) -> Result<Vec<AttachmentRow>, Error> {
        let mut transaction = self.pool().begin().await?;
        lock(&mut transaction, volume).await?;
        let of_sandbox =
            |rows: Vec<AnyRow>| rows.iter().map(attachment).collect::<Result<Vec<_>, _>>();
        let statement = format!("{SELECT_ATTACHMENTS} WHERE sandbox = $1 ORDER BY slot");
        let query = sqlx::query(&statement).bind(sandbox.to_string());
        let mut held = of_sandbox(query.fetch_all(&mut *transaction).await?)?;
        if let Some(at) = held.iter().position(|row| row.volume == *volume) {
            let gone = held.remove(at);
            sqlx::query("DELETE FROM attachments WHERE volume = $1 AND sandbox = $2")
                .bind(volume.to_string())
                .bind(sandbox.to_string())
                .execute(&mut *transaction)
                .await?;
            let behind = held.iter_mut().filter(|row| {
                row.slot > gone.slot && row.slot != ROOT_SLOT && row.read_only == gone.read_only
            });
            for row in behind {
                row.slot -= 1;
                sqlx::query("UPDATE attachments SET slot = $3 WHERE volume = $1 AND sandbox = $2")
                    .bind(row.volume.to_string())
                    .bind(sandbox.to_string())
                    .bind(i64::from(row.slot))
                    .execute(&mut *transaction)
                    .await?;
            }
        }
        transaction.commit().await?;
        Ok(held)
    }

    /// By slot.
    pub(crate) async fn all_attachments(&self) -> Result<Vec<AttachmentRow>, Error> {
        let rows = sqlx::query(&format!("{SELECT_ATTACHMENTS} ORDER BY slot"))
            .fetch_all(self.pool())
            .await?;
        rows.iter().map(attachment).collect()
    }

    pub(crate) async fn holders_of_volume(
        &self,
        id: &VolumeId,
    ) -> Result<Vec<AttachmentRow>, Error> {
        let mut connection = self.pool().acquire().await?;
        holders(&mut connection, id).await
    }
}

/// Until the transaction's end nobody else claims or deletes this volume. False: there is none.
async fn lock(connection: &mut AnyConnection, id: &VolumeId) -> Result<bool, Error> {
    // SQLite has one writer at a time; PostgreSQL locks the row that is written.
    let done = sqlx::query("UPDATE volumes SET kind = kind WHERE id = $1")
        .bind(id.to_string())
        .execute(connection)
        .await?;
    Ok(done.rows_affected() == 1)
}

async fn holders(
    connection: &mut AnyConnection,
    id: &VolumeId,
) -> Result<Vec<AttachmentRow>, Error> {
    let rows = sqlx::query(&format!("{SELECT_ATTACHMENTS} WHERE volume = $1 ORDER BY sandbox"))
        .bind(id.to_string())
        .fetch_all(connection)
        .await?;
    rows.iter().map(attachment).collect()
}

fn unread(what: &str) -> Error {
    Error::internal(format!("a row of volumes has an unreadable {what}"))
}

fn volume(row: &AnyRow) -> Result<VolumeRow, Error> {
    let text = |column: &str| row.try_get::<String, _>(column);
    Ok(VolumeRow {
        id: text("id")?.parse().map_err(|_| unread("id"))?,
        account: text("account")?.parse().map_err(|_| unread("account"))?,
        name: text("name")?.parse().map_err(|_| unread("name"))?,
        kind: match text("kind")?.as_str() {
            "data" => VolumeKind::Data,
            "root" => VolumeKind::Root,
            _ => return Err(unread("kind")),
        },
        size_bytes: unsigned(row.try_get("size_bytes")?)?,
        created_at: row.try_get("created_at")?,
        template: row
            .try_get::<Option<String>, _>("template")?
            .map(|name| name.parse().map_err(|_| unread("template")))
            .transpose()?,
    })
}

fn attachment(row: &AnyRow) -> Result<AttachmentRow, Error> {
    let text = |column: &str| row.try_get::<String, _>(column);
    Ok(AttachmentRow {
        volume: text("volume")?.parse().map_err(|_| unread("volume"))?,
        sandbox: text("sandbox")?.parse().map_err(|_| unread("sandbox"))?,
        slot: unsigned(row.try_get("slot")?)?,
        read_only: row.try_get::<i64, _>("read_only")? != 0,
        mount_path: text("mount_path")?,
        name: text("name")?.parse().map_err(|_| unread("name"))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::{SandboxRow, testing};

    fn hold(volume: &VolumeRow, slot: u8, read_only: bool) -> AttachmentRow {
        AttachmentRow {
            volume: volume.id,
            sandbox: SandboxId::random(),
            slot,
            read_only,
            mount_path: "/mnt/v".to_owned(),
            name: volume.name.clone(),
        }
    }

    fn row(name: &str) -> VolumeRow {
        VolumeRow {
            id: VolumeId::random(),
            account: AccountId::default_account(),
            name: name.parse().unwrap(),
            kind: VolumeKind::Data,
            size_bytes: 1 << 28,
            created_at: 1,
            template: None,
        }
    }

    #[tokio::test]
    async fn a_volume_has_one_writer_or_many_readers() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let volume = row("data");
            let plan = Plan::unlimited();
            assert!(db.insert_volume(&volume, &plan).await.unwrap());
            assert!(!db.insert_volume(&row("data"), &plan).await.unwrap(), "the name is taken");

            let writer = hold(&volume, 0, false);
            assert_eq!(db.claim_volumes(std::slice::from_ref(&writer)).await.unwrap(), Claim::Held);
            for other in [hold(&volume, 0, false), hold(&volume, 8, true)] {
                let taken = Claim::Taken { volume: volume.id, holder: writer.sandbox };
                assert_eq!(db.claim_volumes(&[other]).await.unwrap(), taken);
            }
            assert_eq!(db.delete_volume(&volume.id).await.unwrap(), Some(writer.sandbox));
            db.release_volumes(&writer.sandbox).await.unwrap();

            let readers = [hold(&volume, 8, true), hold(&volume, 8, true)];
            for reader in &readers {
                let claimed = db.claim_volumes(std::slice::from_ref(reader)).await.unwrap();
                assert_eq!(claimed, Claim::Held);
            }
            assert!(matches!(
                db.claim_volumes(&[hold(&volume, 0, false)]).await.unwrap(),
                Claim::Taken { .. }
            ));
            for reader in &readers {
                db.release_volumes(&reader.sandbox).await.unwrap();
            }
            assert_eq!(db.delete_volume(&volume.id).await.unwrap(), None);
            let gone = Claim::Gone { volume: volume.id };
            assert_eq!(db.claim_volumes(&[hold(&volume, 0, false)]).await.unwrap(), gone);
            db.close().await;
        }
    }

    #[tokio::test]
    async fn of_many_who_claim_at_once_one_wins_and_half_a_claim_is_none() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let (one, two) = (row("one"), row("two"));
            for volume in [&one, &two] {
                assert!(db.insert_volume(volume, &Plan::unlimited()).await.unwrap());
            }
            let claims = (0..16).map(|turn| {
                let sandbox = SandboxId::random();
                let mut both: Vec<_> = [(&one, 0), (&two, 1)]
                    .map(|(volume, slot)| AttachmentRow { sandbox, ..hold(volume, slot, false) })
                    .into();
                if turn % 2 == 0 {
                    both.reverse();
                }
                let db = db.clone();
                async move { db.claim_volumes(&both).await.unwrap() }
            });
            let outcomes = futures::future::join_all(claims).await;
            let held = outcomes.iter().filter(|outcome| **outcome == Claim::Held).count();
            assert_eq!(held, 1, "{outcomes:?}");
            assert_eq!(db.all_attachments().await.unwrap().len(), 2);
            db.close().await;
        }
    }

    #[tokio::test]
    async fn the_disks_of_databases_are_not_shown() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let plan = Plan::unlimited();
            let root = |name: &str| VolumeRow { kind: VolumeKind::Root, ..row(name) };
            let of_database = testing::sandbox_row(SandboxId::random());
            let machine =
                SandboxRow { managed: false, ..testing::sandbox_row(SandboxId::random()) };
            let of_machine = root("of-machine");
            db.insert_sandbox(&of_database, Some(&root("of-database")), &plan).await.unwrap();
            db.insert_sandbox(&machine, Some(&of_machine), &plan).await.unwrap();
            // Of a clone that is being made.
            let clone = testing::database_row(5000);
            assert!(db.insert_database(&clone, &plan).await.unwrap());
            let id = clone.id.to_string().parse().unwrap();
            let awaited = VolumeRow { id, ..root("awaited") };
            let (kept, data) = (root("kept"), row("data"));
            for volume in [&awaited, &kept, &data] {
                assert!(db.insert_volume(volume, &plan).await.unwrap());
            }
            let account = AccountId::default_account();
            assert_eq!(db.volumes(&account).await.unwrap().len(), 5);
            let shown = db.shown_volumes(&account).await.unwrap();
            assert_eq!(shown.len(), 3);
            assert!([of_machine, kept, data].iter().all(|volume| shown.contains(volume)));
            db.close().await;
        }
    }

    #[tokio::test]
    async fn what_is_behind_a_volume_that_goes_moves_up() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let sandbox = SandboxId::random();
            let mut held = Vec::new();
            for (name, slot, read_only) in [
                ("a", 0, false),
                ("b", 1, false),
                ("c", 2, false),
                ("d", 8, true),
                ("r", ROOT_SLOT, false),
            ] {
                let volume = row(name);
                assert!(db.insert_volume(&volume, &Plan::unlimited()).await.unwrap());
                held.push(AttachmentRow { sandbox, ..hold(&volume, slot, read_only) });
            }
            assert_eq!(db.claim_volumes(&held).await.unwrap(), Claim::Held);
            for _ in 0..2 {
                let left = db.release_volume(&held[0].volume, &sandbox).await.unwrap();
                let places: Vec<_> = left.iter().map(|row| (row.name.as_str(), row.slot)).collect();
                assert_eq!(places, [("b", 0), ("c", 1), ("d", 8), ("r", ROOT_SLOT)]);
                assert_eq!(left, db.all_attachments().await.unwrap());
            }
            db.release_volumes(&sandbox).await.unwrap();
            let left = db.all_attachments().await.unwrap();
            assert_eq!(left.len(), 1, "the root disk stays with its machine: {left:?}");
            db.close().await;
        }
    }
}
