/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_STORE_ADOPTING_H
#define KVD_TESTS_STORE_ADOPTING_H

/*
 * Daemons one after the other, a table of descriptors that outlives them, and chains of blocks. The
 * bytes of a block follow from all tokens up to its end, so that a block in the wrong place is
 * noticed. Runs on the stand-in GPU if $KVD_TEST_BACKEND is set.
 */

#include <sys/types.h>

#include "store/cache/inside.h"
#include "store/keep.h"
#include "tests/store/fixture.h"

enum { POOL = 256, CHAIN = 40, GPU_SEGMENTS = 4, MOST = 4096 };

extern struct kept_file kept[MOST];
extern size_t n_kept;
extern unsigned long n_keeps, n_drops, n_unknown;
extern char last_said[512];
extern const struct keep_ops no_ops; /* they keep nothing */

extern bool arena;       /* settings of daemons opened from now on; so are those below */
extern bool all_at_once; /* whether adopt also takes all blocks over */
extern uint64_t quota, pool, keep_bytes;
extern uint32_t attachments;
extern uint8_t uuid[16]; /* of the GPU */

bool on_gpu(void);
void set_up(void);
void tear_down(void);
void open_daemon(void); /* takes nothing over yet, and makes no GPU memory */
void adopt(void);
void take_all_over(void); /* the blocks of all spaces */
void make_memory(void);
void kill_daemon(void); /* leaves it as it is */
void stop_daemon(void);
void next_daemon(void);
void restart(int how); /* 0: kills the daemon; otherwise stops it */
struct space *space_again(const char *name);
void forget(const char *what); /* a kept file whose name contains this */
void squeeze(struct space *space);
void look(void);

struct chain {
        uint64_t salt;
        uint32_t n, tokens[CHAIN * BT];
        kvd_ref refs[CHAIN];
};

/* Seals n blocks. The first `same` ones have the tokens of the chain made from seed_before. */
void make_chain(struct attachment *a, struct chain *c, uint32_t n, uint64_t salt, uint32_t seed,
                uint32_t same, uint32_t seed_before);
uint32_t check_all(struct space *space);
uint32_t found(struct space *space, const struct chain *c);
struct kvd_pin_words *map_pins(struct attachment *a);
struct kvd_pinpage *page_of(struct kvd_pin_words *words);
int pidfd_of(pid_t pid);
struct attachment *attach_kept(struct space *space, pid_t pid);

#endif
