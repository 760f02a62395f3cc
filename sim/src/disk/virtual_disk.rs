//! A modelled disk under virtual time. The queue and the scheduler are the runtime's. The waiting thread
//! takes their turns, so that the same requests end at the same times.

use super::clock::VirtualClock;
use super::model::{Link, Modelled};
use moec_runtime::Result;
use moec_runtime::offload::disk::files::Files;
use moec_runtime::offload::disk::{
    Buffers, Clock, Disk, DiskQueue, Event, ExtentTable, Options, Reader, Worker, open,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A disk whose time passes in [`Disk::wait_for_event`] and [`VirtualDisk::pass`], from 0 on.
pub struct VirtualDisk {
    queue: DiskQueue,
    worker: Mutex<Worker>,
    clock: Arc<VirtualClock>,
    description: String,
}

impl VirtualDisk {
    /// Creates a disk on a link. If it `reads`, bytes come from the files of `table`; else no file is opened,
    /// nothing is read, and no checksum is computed.
    ///
    /// # Errors
    /// An option out of its range; if it reads, as [`moec_runtime::offload::disk::ThreadedDisk::open`].
    pub fn new(
        table: Arc<ExtentTable>,
        buffers: Arc<Buffers>,
        options: &Options,
        link: Link,
        reads: bool,
    ) -> Result<Self> {
        options.check()?;
        let options = Options { verify_reads: options.verify_reads && reads, ..*options };
        let files = Arc::new(if reads { Files::open(&table, options.direct)? } else { Files::none() });
        let bytes = reads.then(|| open::reader(&files, &buffers, &options)).transpose()?;
        let clock = Arc::new(VirtualClock::default());
        let reader = Modelled::new(link, Arc::clone(&clock), bytes);
        let description = format!("{}, blocks of {} KiB", reader.describe(), options.block_bytes >> 10);
        let options = Options { depth: reader.depth() as u32, ..options };
        let queue = DiskQueue::new(table, buffers);
        let own: Arc<dyn Clock> = Arc::<VirtualClock>::clone(&clock);
        let worker = Mutex::new(Worker::new(&queue, Box::new(reader), files, own, &options));
        Ok(Self { queue, worker, clock, description })
    }

    /// Advances the time while another unit works; the disk meanwhile handles its requests.
    pub fn pass(&self, time: Duration) {
        let end = self.clock.now().saturating_add(time);
        let mut worker = self.settle();
        while let left = end.saturating_sub(self.clock.now())
            && left > Duration::ZERO
            && worker.run_once(Some(left)).is_some()
        {}
    }

    /// Does everything that is possible at this moment, so that a second call has no effect.
    fn settle(&self) -> MutexGuard<'_, Worker> {
        let mut worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        while worker.run_once(Some(Duration::ZERO)).is_some_and(|ended| ended > 0) {}
        worker
    }
}

impl Disk for VirtualDisk {
    fn queue(&self) -> &DiskQueue {
        &self.queue
    }

    fn wake(&self) {
        drop(self.settle());
    }

    /// Waits until there is an event or no read is in flight.
    fn wait_for_event(&self, _: Option<Duration>) -> bool {
        let mut worker = self.settle();
        while !self.queue.has_events() && worker.in_flight() > 0 && worker.run_once(None).is_some() {}
        self.queue.has_events()
    }

    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn describe(&self) -> &str {
        &self.description
    }

    fn poll(&self) -> Option<Event> {
        drop(self.settle());
        self.queue.poll()
    }
}
