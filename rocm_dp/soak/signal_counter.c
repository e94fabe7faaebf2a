/*
 * Counts the live HSA signals of a process. Preloaded, it stands before the HSA runtime: it passes each call on and
 * notes what came of it. rocm_dp_hsa_signals() tells the numbers: live, peak, created, destroyed.
 *
 * The runtime may have been loaded out of the global scope (Python loads extension modules so), where RTLD_NEXT does
 * not look: then it is found among the loaded objects by its name.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    uint64_t handle;
} hsa_signal_t;
typedef int64_t hsa_signal_value_t;
typedef uint32_t hsa_status_t;

enum { HSA_STATUS_SUCCESS = 0, HSA_STATUS_ERROR_NOT_INITIALIZED = 0x100B };

static const char runtime_name[] = "libhsa-runtime64";
static _Atomic int64_t live, peak, created, destroyed;

static int find_runtime(struct dl_phdr_info *info, size_t size, void *found) {
    (void)size;
    if (info->dlpi_name == NULL || strstr(info->dlpi_name, runtime_name) == NULL) return 0;
    *(void **)found = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    return *(void **)found != NULL;
}

static void *real(const char *name) {
    void *function = dlsym(RTLD_NEXT, name);
    if (function != NULL) return function;
    void *runtime = NULL;
    dl_iterate_phdr(find_runtime, &runtime);
    return runtime == NULL ? NULL : dlsym(runtime, name);
}

static hsa_status_t note_created(hsa_status_t status) {
    if (status != HSA_STATUS_SUCCESS) return status;
    atomic_fetch_add(&created, 1);
    int64_t now = atomic_fetch_add(&live, 1) + 1;
    int64_t most = atomic_load(&peak);
    while (now > most && !atomic_compare_exchange_weak(&peak, &most, now)) {
    }
    return status;
}

hsa_status_t hsa_signal_create(hsa_signal_value_t value, uint32_t consumers, const void *agents, hsa_signal_t *out) {
    static hsa_status_t (*_Atomic next)(hsa_signal_value_t, uint32_t, const void *, hsa_signal_t *);
    if (next == NULL) next = real("hsa_signal_create");
    return next == NULL ? HSA_STATUS_ERROR_NOT_INITIALIZED : note_created(next(value, consumers, agents, out));
}

hsa_status_t hsa_amd_signal_create(hsa_signal_value_t value, uint32_t consumers, const void *agents,
                                   uint64_t attributes, hsa_signal_t *out) {
    static hsa_status_t (*_Atomic next)(hsa_signal_value_t, uint32_t, const void *, uint64_t, hsa_signal_t *);
    if (next == NULL) next = real("hsa_amd_signal_create");
    return next == NULL ? HSA_STATUS_ERROR_NOT_INITIALIZED
                        : note_created(next(value, consumers, agents, attributes, out));
}

hsa_status_t hsa_signal_destroy(hsa_signal_t signal) {
    static hsa_status_t (*_Atomic next)(hsa_signal_t);
    if (next == NULL) next = real("hsa_signal_destroy");
    if (next == NULL) return HSA_STATUS_ERROR_NOT_INITIALIZED;
    hsa_status_t status = next(signal);
    if (status == HSA_STATUS_SUCCESS) {
        atomic_fetch_add(&destroyed, 1);
        atomic_fetch_sub(&live, 1);
    }
    return status;
}

void rocm_dp_hsa_signals(int64_t counts[4]) {
    counts[0] = atomic_load(&live);
    counts[1] = atomic_load(&peak);
    counts[2] = atomic_load(&created);
    counts[3] = atomic_load(&destroyed);
}
