"""rocm_dp under the names and signatures of inference engines, of which nothing is imported before it is used."""
