//! A file fetched from, or put to, an address: a process of its own, beside the agent, that belongs to the user's. It is told
//! what to do on its standard input, so that the address, which may be a credential, is in no command line.

mod export;
mod import;
mod names;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use protocol::transfer::{Outcome, Task, Transfer, TransferFailure, Transferred};
use ureq::config::Config;
use ureq::http::{HeaderMap, Response, StatusCode};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::unversioned::transport::DefaultConnector;
use ureq::{Agent, Body};

/// With a URL and headers.
const LONGEST_ORDER: u64 = 4 << 20;
const ATTEMPTS: u32 = 6;
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const CONNECT: Duration = Duration::from_secs(20);
/// Without a byte.
const STALL: Duration = Duration::from_secs(60);
const PIECE: usize = 256 << 10;
/// Of a refusal's body.
const MOST_SAID: u64 = 8 << 10;
const LONGEST_MESSAGE: usize = 300;
/// Where systems keep the authorities they trust.
const BUNDLES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
];

/// What became of one attempt.
enum Attempt {
    Over(Result<Transferred, TransferFailure>),
    /// It may work another time; what is said if it does not.
    Again(TransferFailure),
}

/// The program `transfer`: its exit code.
pub fn run() -> i32 {
    let mut order = Vec::new();
    let read = std::io::stdin().take(LONGEST_ORDER).read_to_end(&mut order);
    let outcome = match (read, protocol::message::decode::<Transfer>(&order)) {
        (Ok(_), Ok(transfer)) => match perform(&transfer) {
            Ok(transferred) => Outcome::Done(transferred),
            Err(failure) => Outcome::Failed(failure),
        },
        _ => Outcome::Failed(TransferFailure::Invalid("the order cannot be read".to_owned())),
    };
    let told = std::io::stdout().write_all(&protocol::message::encode(&outcome));
    i32::from(told.is_err())
}

/// # Errors
/// Why the file is not there.
pub fn perform(transfer: &Transfer) -> Result<Transferred, TransferFailure> {
    let deadline = Instant::now() + Duration::from_millis(transfer.deadline_ms);
    let client = Client { agent: agent(), transfer, deadline };
    match &transfer.task {
        Task::Import { file, sha256 } => {
            let mut import = import::Import::new(file, sha256.as_deref());
            client.until_over(|client| import.attempt(client))
        }
        Task::Export { path, method } => {
            client.until_over(|client| export::attempt(client, path, method))
        }
    }
}

struct Client<'a> {
    agent: Agent,
    transfer: &'a Transfer,
    deadline: Instant,
}

impl Client<'_> {
    #[expect(clippy::disallowed_methods, reason = "a process of its own, with one thread")]
    fn until_over(
        &self,
        mut attempt: impl FnMut(&Self) -> Attempt,
    ) -> Result<Transferred, TransferFailure> {
        let mut pause = FIRST_PAUSE;
        for number in 1.. {
            let failure = match attempt(self) {
                Attempt::Over(outcome) => return outcome,
                Attempt::Again(failure) => failure,
            };
            if self.left().is_zero() {
                return Err(TransferFailure::OutOfTime);
            }
            if number == ATTEMPTS {
                return Err(failure);
            }
            std::thread::sleep(pause.min(self.left()));
            pause *= 2;
        }
        Err(TransferFailure::OutOfTime)
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
}

fn agent() -> Agent {
    let config = Config::builder()
        .http_status_as_error(false)
        // A proxy of the environment's is for whoever set it.
        .proxy(None)
        .accept_encoding("identity")
        .user_agent(concat!("atoll/", env!("CARGO_PKG_VERSION")))
        .timeout_connect(Some(CONNECT))
        .timeout_per_read(Some(STALL))
        .timeout_per_write(Some(STALL))
        .timeout_recv_response(Some(2 * STALL))
        .tls_config(TlsConfig::builder().root_certs(authorities()).build())
        .build();
    Agent::with_parts(config, DefaultConnector::default(), names::Names)
}

/// Those that this system trusts, with those that browsers do.
fn authorities() -> RootCerts {
    let own = BUNDLES.iter().find_map(|path| std::fs::read(path).ok()).unwrap_or_default();
    let own = parse_pem(&own).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    let built_in = webpki_root_certs::TLS_SERVER_ROOT_CERTS.iter();
    let built_in = built_in.map(|certificate| Certificate::from_der(certificate).to_owned());
    RootCerts::from(own.chain(built_in))
}

/// Not reached, or broken off: worth another attempt unless it is about what was asked for.
#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "it has variants of features, and will have more"
)]
fn broken(error: &ureq::Error) -> Attempt {
    match error {
        ureq::Error::BadUri(_) | ureq::Error::Http(_) => {
            Attempt::Over(Err(TransferFailure::Invalid(
                "`url` must be `http://…` or `https://…`, and headers must be plain text"
                    .to_owned(),
            )))
        }
        ureq::Error::TooManyRedirects | ureq::Error::RedirectFailed => {
            Attempt::Over(Err(TransferFailure::Unreachable(
                "it leads elsewhere too many times, or nowhere".to_owned(),
            )))
        }
        ureq::Error::HostNotFound => {
            again("there is no such host, or the network policy closes it")
        }
        ureq::Error::Timeout(_) => again("it did not answer"),
        ureq::Error::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            again("nothing listens there")
        }
        ureq::Error::Io(error) => again(&in_words(error)),
        ureq::Error::ConnectionFailed => again("no connection can be made"),
        ureq::Error::Rustls(error) => {
            Attempt::Over(Err(TransferFailure::Unreachable(format!("TLS: {error}"))))
        }
        ureq::Error::Tls(reason) => {
            Attempt::Over(Err(TransferFailure::Unreachable(format!("TLS: {reason}"))))
        }
        // Their words may have the address in them.
        _ => again("the connection broke off"),
    }
}

fn again(reason: &str) -> Attempt {
    Attempt::Again(TransferFailure::Unreachable(reason.to_owned()))
}

fn in_words(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

/// What is to be made of an answer that is no success.
fn refused(response: &mut Response<Body>) -> Attempt {
    let status = response.status();
    let mut said = Vec::new();
    // As much as there is.
    let _ = response.body_mut().as_reader().take(MOST_SAID).read_to_end(&mut said);
    let said = String::from_utf8_lossy(&said);
    let message = element(&said, "Message").unwrap_or_else(|| plain(&said));
    let failure = TransferFailure::Answered {
        status: status.as_u16(),
        code: element(&said, "Code"),
        message,
    };
    let passes = status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED;
    if passes || status == StatusCode::TOO_MANY_REQUESTS || status == StatusCode::REQUEST_TIMEOUT {
        Attempt::Again(failure)
    } else {
        Attempt::Over(Err(failure))
    }
}

/// Of the XML that object storages answer with.
fn element(text: &str, name: &str) -> Option<String> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    let (content, _) = rest.split_once(&format!("</{name}>"))?;
    Some(plain(content))
}

fn plain(text: &str) -> String {
    let text: String = text.chars().map(|one| if one.is_control() { ' ' } else { one }).collect();
    text.trim().chars().take(LONGEST_MESSAGE).collect()
}

fn text_of(headers: &HeaderMap, name: &str) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.to_owned())
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
