//! Requests: put together from their frames, then handed to whoever answers them.

use std::sync::Arc;

use protocol::frame::Frame;
use protocol::message::{ErrorCode, Failure, FileRequest};
use protocol::{Reply, Request};

use super::Server;
use super::stop::Purpose;
use super::stream::{Role, Stream};
use crate::failure::refuse;
use crate::users::Accounts;

impl Server {
    pub(crate) fn take_request(&mut self, frame: &Frame<'_>) {
        let number = frame.header.stream;
        if !self.streams.contains_key(&number) && self.streams.len() >= protocol::MAX_STREAMS {
            self.port.output.reset(number);
            return;
        }
        if frame.header.more {
            let held: usize = self.streams.values().map(Stream::held_bytes).sum();
            if held + frame.payload.len() > self.most_held {
                self.end_with(
                    number,
                    Err(refuse(ErrorCode::Busy, "too many long requests at once; try again later")),
                );
                return;
            }
        }
        let stream = self.streams.entry(number).or_insert_with(Stream::new);
        let Role::Opening { assembler, bytes } = &mut stream.role else {
            // A number is used once.
            self.close(number);
            self.port.output.reset(number);
            return;
        };
        *bytes += frame.payload.len();
        let request = match assembler.push(frame) {
            Ok(None) => return,
            Ok(Some(message)) => protocol::message::decode(&message).map_err(|_| {
                refuse(ErrorCode::Invalid, "the agent in this sandbox does not know this request")
            }),
            Err(error) => Err(refuse(ErrorCode::TooLarge, error.to_string())),
        };
        stream.role = Role::Answering;
        self.act(number, request);
    }

    pub(crate) fn act(&mut self, stream: u32, request: Result<Request, Failure>) {
        match request.and_then(|request| self.answer(stream, request)) {
            Ok(Some(reply)) => self.end_with(stream, Ok(reply)),
            Ok(None) => {}
            Err(failure) => self.end_with(stream, Err(failure)),
        }
    }

    /// The whole answer, or `None`: it will come.
    fn answer(&mut self, stream: u32, request: Request) -> Result<Option<Reply>, Failure> {
        if self.must_wait(&request) {
            self.defer(stream, request);
            return Ok(None);
        }
        match request {
            Request::Ping => Ok(Some(Reply::Done)),
            Request::Repair(repair) => {
                self.repair(stream, repair);
                Ok(None)
            }
            Request::Sync => {
                self.flush_disks(stream);
                Ok(None)
            }
            Request::Shutdown { grace_ms } => {
                self.shut_down(stream, grace_ms, Purpose::PowerOff);
                Ok(None)
            }
            Request::Release { grace_ms } => {
                self.shut_down(stream, grace_ms, Purpose::Release);
                Ok(None)
            }
            Request::Quiesce => Ok(self.quiesce(stream).then_some(Reply::Done)),
            Request::Thaw { unix_time_ns } => {
                self.thaw(Some(stream), Some(unix_time_ns));
                Ok(None)
            }
            Request::VolumesMount { volumes } => {
                self.change_volumes(stream, move |state| state.mount(&volumes));
                Ok(None)
            }
            Request::VolumesUnmount { slots } => {
                self.change_volumes(stream, move |state| state.unmount(&slots));
                Ok(None)
            }
            Request::VolumeGrow { slot } => {
                self.change_volumes(stream, move |state| state.grow(slot));
                Ok(None)
            }
            Request::ExecStart(start) => self.start_exec(stream, start).map(|()| None),
            Request::ExecWatch { id, stdout_offset, stderr_offset } => {
                self.watch_exec(stream, &id, stdout_offset, stderr_offset).map(|()| None)
            }
            Request::ExecStatus { id } => {
                let serial = self.execs.by_id(&id)?;
                let exec = self.execs.get(serial);
                Ok(exec.map(|exec| Reply::ExecStatus(exec.status())))
            }
            Request::ExecList => Ok(Some(Reply::Execs(self.execs.statuses()))),
            Request::ExecCancel { id, grace_ms } => {
                self.cancel_exec(&id, grace_ms)?;
                Ok(Some(Reply::Done))
            }
            Request::ExecsForget { ids } => {
                for id in ids {
                    self.forget_exec(&id);
                }
                Ok(Some(Reply::Done))
            }
            Request::FileRead(request) => {
                self.read_file(stream, None, request);
                Ok(None)
            }
            Request::FileWrite(request) => {
                self.write_file(stream, None, request);
                Ok(None)
            }
            Request::FileDelete { path } => {
                self.delete_file(stream, None, path.into_vec());
                Ok(None)
            }
            Request::DirList { path, depth } => {
                self.list_directory(stream, None, path.into_vec(), depth);
                Ok(None)
            }
            Request::Dial { port } => self.dial(stream, port).map(|()| None),
            Request::Listeners => {
                self.list_listeners(stream);
                Ok(None)
            }
            Request::FileStat { path } => {
                self.stat_file(stream, None, path.into_vec());
                Ok(None)
            }
            Request::TerminalOpen(open) => self.open_terminal(stream, open).map(|()| None),
            Request::TerminalAttach { id, offset, size } => {
                self.attach_terminal(stream, &id, offset, size).map(|()| None)
            }
            Request::TerminalResize { id, size } => {
                self.resize_terminal(&id, size).map(|()| Some(Reply::Done))
            }
            Request::TerminalSignal { id, signal } => {
                self.signal_terminal(&id, signal).map(|()| Some(Reply::Done))
            }
            Request::TerminalEnd { id, grace_ms } => {
                self.end_terminal(&id, grace_ms).map(|()| Some(Reply::Done))
            }
            Request::TerminalList => Ok(Some(Reply::Terminals(self.terminals.statuses()))),
            Request::FileAs { user, request } => {
                let user = Some(Arc::new(Accounts::read().find(&user)?));
                match request {
                    FileRequest::Read(request) => self.read_file(stream, user, request),
                    FileRequest::Write(request) => self.write_file(stream, user, request),
                    FileRequest::Delete { path } => {
                        self.delete_file(stream, user, path.into_vec());
                    }
                    FileRequest::List { path, depth } => {
                        self.list_directory(stream, user, path.into_vec(), depth);
                    }
                    FileRequest::Stat { path } => self.stat_file(stream, user, path.into_vec()),
                }
                Ok(None)
            }
            Request::KernelPrepare => self.prepare_kernels(stream).map(|()| None),
            Request::KernelStart(start) => self.start_kernel(stream, &start).map(|()| None),
            Request::KernelRun(run) => self.run_cell(stream, run).map(|()| None),
            Request::KernelRestart { id } => self.restart_kernel(stream, &id).map(|()| None),
            Request::KernelEnd { id } => self.end_kernel(&id).map(|()| Some(Reply::Done)),
            Request::KernelList => Ok(Some(Reply::Kernels(self.kernels.statuses()))),
            Request::Files { user, request } => {
                let user =
                    user.map(|user| Accounts::read().find(&user).map(Arc::new)).transpose()?;
                self.handle_files(stream, user, request);
                Ok(None)
            }
        }
    }
}
