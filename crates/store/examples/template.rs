use std::time::Instant;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let layout = store::Layout::create(&a[1], &a[2]).unwrap();
    let t = Instant::now();
    let mut say = |l: &str| println!("[{:.1}] {l}", t.elapsed().as_secs_f32());
    for name in &a[3..] {
        let result = if let Ok(text) = std::fs::read_to_string(name).as_deref() {
            store::recipe::Recipe::parse(text).and_then(|r| {
                store::template::build_from_recipe(
                    &layout,
                    &r.resolve(&store::recipe::find_builtin)?,
                    &mut say,
                )
            })
        } else if name.contains('/') {
            store::template::build_from_tar(
                &layout,
                name.as_ref(),
                store::template::Size { cpu: 1, memory_mb: 512, disk_mb: 2048 },
                &mut say,
            )
        } else {
            let r = store::recipe::find_builtin(&name.parse().unwrap()).unwrap();
            store::template::build_from_recipe(
                &layout,
                &r.resolve(&store::recipe::find_builtin).unwrap(),
                &mut say,
            )
        };
        match result {
            Ok(x) => println!("[{:.1}] {x:#?}", t.elapsed().as_secs_f32()),
            Err(e) => println!("ERROR {e} {:?}", e),
        }
    }
}
