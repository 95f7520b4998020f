"""What takes how long, where no benchmark of `kvdsl bench` says so."""
