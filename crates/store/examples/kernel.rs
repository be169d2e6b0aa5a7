use std::time::Instant;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let layout = store::Layout::create(&a[1], &a[2]).unwrap();
    let t = Instant::now();
    let k = store::kernel::ensure_kernel(&layout, &mut |l| {
        println!("[{:.1}] {l}", t.elapsed().as_secs_f32())
    })
    .unwrap();
    println!("{k:#?}");
    if let Some(agent) = a.get(3) {
        println!("{:?}", store::initramfs::build(&layout, &k, &std::fs::read(agent).unwrap()));
    }
}
