//! From settings to a server that answers, and the set-up that can be done before.

use std::{collections::BTreeSet, future::Future, net::SocketAddr, sync::Arc, time::Duration};

use api::{AccountId, ErrorCode};
use machine::{
    Accelerator, Hypervisor, Shape,
    network::{NetworkConfig, Networks},
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use store::{Layout, initramfs::Initramfs, kernel::Kernel, prune::InUse};
use tokio::net::TcpListener;

use crate::{
    AGENT, App, Config, Error,
    account::{Alive, Plans},
    buffers::Buffers,
    clock::Clock,
    database::{self, Databases},
    db::Db,
    http::{Connections, Idempotency, Rate},
    instance::Instance,
    keys::Keys,
    metrics::Metrics,
    previews::Previews,
    sandbox::{Bakes, DEFAULT_TEMPLATE, Kind, Parts, Pool, Sandboxes, Sites, Size, Slots},
    template::Templates,
    volume::Volumes,
};

/// Of the set-up, where nobody's request waits.
const SET_UP_PATIENCE: Duration = Duration::from_secs(1800);

/// Baked ahead beside each template's own size: the machines dialect's default.
const SMALL: Shape = Shape { cpus: 1, memory_mib: 1024 };

/// What a server holds for as long as it lives.
struct Ground {
    instance: Instance,
    db: Db,
    networks: Arc<Networks>,
    templates: Arc<Templates>,
    bakes: Arc<Bakes>,
    sites: Sites,
    hypervisor: Hypervisor,
    clock: Clock,
    _guest_files: InUse,
}

/// Serves until `shutdown` resolves. Running sandboxes go on afterwards, for the next server of the data directory.
///
/// `ready` is called once with the address, and with the first key where none existed before.
///
/// # Errors
/// What keeps it from starting, with the way out.
pub async fn run(
    config: Config,
    ready: impl FnOnce(SocketAddr, Option<String>),
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Error> {
    let listener = TcpListener::bind(config.listen).await.map_err(|source| {
        refuse(format!(
            "cannot listen on {}: {source}; name another address with --listen",
            config.listen
        ))
    })?;
    let address = listener.local_addr().map_err(Error::internal)?;
    let ground = Ground::lay(&config, &mut |line| tracing::info!("{line}")).await?;
    let pool = Pool::new(
        ground.hypervisor.clone(),
        ground.sites.clone(),
        ground.clock.clone(),
        config.ready_machines,
    );
    let volumes = Volumes::new(
        ground.db.clone(),
        ground.clock.clone(),
        ground.sites.layout.clone(),
        config.volumes.clone(),
    );
    let parts = Parts {
        db: ground.db.clone(),
        clock: ground.clock.clone(),
        templates: Arc::clone(&ground.templates),
        bakes: Arc::clone(&ground.bakes),
        pool: Arc::clone(&pool),
        sites: ground.sites.clone(),
        volumes: Arc::clone(&volumes),
    };
    let sandboxes = Sandboxes::new(parts, &config)?;
    check_plans(&ground.db, &config.plans).await?;
    let alive = Alive::open(&config.data_dir, &ground.clock, &ground.db).await?;
    ground.db.set_end(Some(alive.last()));
    sandboxes.recover().await?;
    ground.db.set_end(None);
    let databases =
        Databases::open(ground.db.clone(), ground.clock.clone(), Arc::clone(&sandboxes), &config)
            .await?;
    databases.recover().await?;
    let (keys, first_key) = Keys::open(
        ground.db.clone(),
        ground.clock.clone(),
        config.api_key.clone(),
        Arc::clone(&config.plans),
    )
    .await?;
    let previews = Previews::open(ground.db.clone(), ground.clock.clone()).await?;
    let app = Arc::new(App {
        previews,
        buffers: Buffers::new(config.capacity.buffer_bytes),
        rate: Rate::new(config.capacity.rate_limit),
        idempotency: Idempotency::default(),
        connections: Connections::new(config.capacity.most_connections.min(open_files() / 2)),
        config,
        clock: ground.clock.clone(),
        keys,
        metrics: Arc::new(Metrics::new()),
        sandboxes: Arc::clone(&sandboxes),
        databases: Arc::clone(&databases),
        volumes,
        templates: Arc::clone(&ground.templates),
        db: ground.db.clone(),
    });
    let warm_up = tokio::spawn(keep_defaults_ready(
        Arc::clone(&ground.templates),
        Arc::clone(&ground.bakes),
        pool,
    ));
    // Beside the first requests: what other servers left can wait.
    let sweep = tokio::spawn(crate::sweep::at_start(
        app.config.clone(),
        ground.sites.layout.clone(),
        ground.clock.clone(),
    ));
    let prune = tokio::spawn(crate::http::prune(ground.db.clone(), ground.clock.clone()));
    let alive = tokio::spawn(alive.beat());
    ready(address, first_key);
    crate::http::serve(app, listener, shutdown).await;
    warm_up.abort();
    prune.abort();
    alive.abort();
    sweep.abort();
    databases.close().await;
    sandboxes.close().await;
    ground.close(&sandboxes.slots()).await
}

/// Everything that a first start would have to make, with a line for each step: kernel, templates, their default sizes.
/// Ends early, and leaves nothing half-made, when `shutdown` resolves.
///
/// # Errors
/// What is missing, with the way out.
pub async fn prepare(
    config: &Config,
    progress: &mut (dyn FnMut(&str) + Send),
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let ground = Ground::lay(config, progress).await?;
    let done = tokio::select! {
        done = bake_defaults(&ground, progress) => done,
        () = shutdown => Err(refuse("interrupted")),
    };
    done.and(ground.close(&BTreeSet::new()).await)
}

async fn bake_defaults(
    ground: &Ground,
    progress: &mut (dyn FnMut(&str) + Send),
) -> Result<(), Error> {
    for name in ground.templates.built_in_names() {
        progress(&format!("template {name}"));
        let (lines, mut received) = tokio::sync::mpsc::unbounded_channel();
        let building = ground.templates.prepare(&name, move |line| {
            // The receiver lives as long as the build.
            let _ = lines.send(line.to_owned());
        });
        tokio::pin!(building);
        let template = loop {
            tokio::select! {
                built = &mut building => break built?,
                Some(line) = received.recv() => progress(&format!("template {name}: {line}")),
            }
        };
        if name.as_str() == DEFAULT_TEMPLATE {
            ground.bakes.name_guest(&template).await?;
        }
        for size in default_sizes(&template) {
            progress(&format!(
                "bake {name} with {} vCPUs and {} MiB",
                size.shape.cpus, size.shape.memory_mib
            ));
            ground.bakes.get(&template, &size, SET_UP_PATIENCE).await?;
        }
    }
    Ok(())
}

fn default_sizes(template: &store::template::Template) -> Vec<Size> {
    let mut shapes = vec![Size::default_of(template).shape, SMALL];
    shapes.dedup();
    shapes.into_iter().map(|shape| Size { shape, disk_mib: template.disk_mb }).collect()
}

/// Builds and bakes what a first create would otherwise wait for, and has machines of it stand ready.
async fn keep_defaults_ready(templates: Arc<Templates>, bakes: Arc<Bakes>, pool: Arc<Pool>) {
    let account = AccountId::default_account();
    let mut names = templates.built_in_names();
    names.sort_by_key(|name| name.as_str() != DEFAULT_TEMPLATE);
    for name in names {
        let baked = async {
            let template = templates.built(&account, &name, SET_UP_PATIENCE).await?;
            let mut sizes = default_sizes(&template);
            sizes.truncate(1);
            for size in sizes {
                let baked = bakes.get(&template, &size, SET_UP_PATIENCE).await?;
                // A database is not made every moment.
                if name.as_str() != database::TEMPLATE {
                    pool.want(&baked, Kind::Process);
                }
            }
            Ok::<_, Error>(())
        };
        if let Err(error) = baked.await {
            tracing::warn!(template = %name, %error, cause = error.causes(), "failed to make a template ready");
        }
    }
}

/// Made if need be, and held, so that no other server's sweep takes them away.
fn guest_files(layout: &Layout) -> Result<(Kernel, Initramfs, InUse), store::Error> {
    let make = || {
        let kernel = store::kernel::ensure_kernel(layout, &mut |line: &str| {
            tracing::info!("guest kernel: {line}");
        })?;
        let initramfs = store::initramfs::build(layout, &kernel, AGENT)?;
        let held = store::prune::hold(&kernel, &initramfs)?;
        Ok((kernel, initramfs, held))
    };
    // One that was old may have been pruned between being found and being held. What is made now is not old.
    make().or_else(|_: store::Error| make())
}

impl Ground {
    async fn lay(config: &Config, progress: &mut (dyn FnMut(&str) + Send)) -> Result<Self, Error> {
        if !rustix::process::geteuid().is_root() {
            return Err(refuse(
                "virtual machines and their networks need root; run this with sudo",
            ));
        }
        let layout =
            Layout::create(&config.data_dir, &config.cache_dir).map_err(Error::from_start)?;
        {
            let layout = layout.clone();
            tokio::task::spawn_blocking(move || warn_of_copies(&layout))
                .await
                .map_err(Error::internal)?
                .map_err(Error::from_start)?;
        }
        let instance =
            Instance::claim(&config.data_dir).map_err(|error| refuse(error.to_string()))?;
        let clock = Clock::open(&config.data_dir.join("clock")).map_err(|source| {
            refuse("cannot keep the clock in the data directory").because(source)
        })?;
        let db = Db::connect(&config.database_url()).await.map_err(|source| {
            refuse("cannot open the database; check --database").because(source)
        })?;
        let db = db.with_clock(&clock);
        let hypervisor = Hypervisor::find().map_err(Error::from_start)?;
        progress("guest kernel");
        let (kernel, initramfs, guest_files) = {
            let layout = layout.clone();
            tokio::task::spawn_blocking(move || guest_files(&layout))
                .await
                .map_err(Error::internal)?
                .map_err(Error::from_start)?
        };
        let remembered = layout.accelerator();
        let accelerator = hypervisor
            .probe(&kernel.vmlinuz, &initramfs.path, &remembered)
            .await
            .map_err(Error::from_start)?;
        progress(&format!("accelerator: {accelerator}"));
        if accelerator == Accelerator::Tcg {
            // By QEMU's own security policy; see docs/reference.
            tracing::warn!(
                "without KVM the emulator itself is no security boundary: only its confinement on this host is"
            );
        }
        let network = NetworkConfig {
            instance: instance.number,
            policy: config.network.clone(),
            resolvers: NetworkConfig::resolvers_of_host().map_err(Error::from_start)?,
        };
        let networks = Arc::new(Networks::new(network).await.map_err(Error::from_start)?);
        let sites = Sites {
            layout: layout.clone(),
            networks: Arc::clone(&networks),
            slots: Slots::default(),
            instance: instance.number,
        };
        let bakes = Bakes::new(hypervisor.clone(), accelerator, kernel, initramfs, sites.clone());
        let templates =
            Templates::open(layout, db.clone(), clock.clone(), Arc::clone(&bakes)).await?;
        tracing::info!(instance = instance.number, %accelerator, qemu = hypervisor.version(), "ready to run machines");
        Ok(Self {
            instance,
            db,
            networks,
            templates,
            bakes,
            sites,
            hypervisor,
            clock,
            _guest_files: guest_files,
        })
    }

    /// Gives back what no sandbox in the `kept` slots needs: a bake under way, and the host's packet filter rules when
    /// there are no such sandboxes.
    async fn close(self, kept: &BTreeSet<u16>) -> Result<(), Error> {
        self.db.close().await;
        self.sites.remove_leftovers(kept).await?;
        if kept.is_empty() {
            self.networks.close().await.map_err(Error::internal)?;
        }
        drop(self.instance);
        Ok(())
    }
}

/// Everything works on any file system, only slower and with more room taken.
fn warn_of_copies(layout: &Layout) -> store::Result<()> {
    if !store::pool::is_same_file_system(layout.data(), layout.cache())? {
        tracing::warn!(
            "the data and the cache directory are on different file systems: every create copies a disk, which takes seconds; put both on one"
        );
    } else if !store::clone::can_reflink(&layout.data_temporary())? {
        tracing::warn!(
            "files cannot share blocks on this file system: every create copies a disk, which takes seconds; `make setup` makes a pool that can"
        );
    }
    Ok(())
}

/// How many files the server may have open: as many as it may allow itself.
fn open_files() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let now = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(error) => {
            tracing::warn!(%error, "failed to raise the limit of open files");
            limit.current
        }
    };
    now.map_or(usize::MAX, |files| usize::try_from(files).unwrap_or(usize::MAX))
}

async fn check_plans(db: &Db, plans: &Plans) -> Result<(), Error> {
    let accounts = db.accounts().await?;
    let lost = accounts.iter().find(|account| plans.get(account.plan.as_deref()).is_none());
    lost.map_or(Ok(()), |account| {
        Err(refuse(format!(
            "account `{}` has the plan `{}`, but there are only {}; name it in the settings file (--settings), or give the account another with `atoll account set-plan`",
            account.id,
            account.plan.as_deref().unwrap_or_default(),
            plans.names()
        )))
    })
}

/// Told to the person who starts the server.
fn refuse(message: impl Into<String>) -> Error {
    Error::new(ErrorCode::InvalidRequest, message)
}
