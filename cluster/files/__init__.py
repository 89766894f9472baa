"""Files of jobs and models, on local disks, mounts and object stores."""
