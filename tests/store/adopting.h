/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_STORE_ADOPTING_H
#define KVD_TESTS_STORE_ADOPTING_H

/*
 * Daemons one after the other, and a table of descriptors that outlives them; and chains whose bytes
 * follow from all tokens up to them, so that a block in the wrong place is seen. On the stand-in
 * GPU, where $KVD_TEST_BACKEND is set.
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
extern const struct keep_ops no_ops; /* keep nothing */

extern bool arena; /* of daemons from now on, as are these */
extern bool all_at_once; /* adopt takes blocks over as well; else that is left to the test */
extern uint64_t quota, pool, keep_bytes;
extern uint32_t attachments;
extern uint8_t uuid[16]; /* of the GPU */

bool on_gpu(void);
void set_up(void);
void tear_down(void);
void open_daemon(void); /* one that has not taken anything over yet, nor has a GPU's memory */
void adopt(void);
void take_all_over(void); /* the blocks of all spaces */
void make_memory(void);
void kill_daemon(void); /* it stays as it is */
void stop_daemon(void);
void next_daemon(void);
void restart(int how); /* 0: it is killed */
struct space *space_again(const char *name);
void forget(const char *what); /* one that is kept, and has this in its name */
void squeeze(struct space *space);
void look(void);

struct chain {
        uint64_t salt;
        uint32_t n, tokens[CHAIN * BT];
        kvd_ref refs[CHAIN];
};

/* n blocks that begin as those of another chain, up to block `same`. */
void make_chain(struct attachment *a, struct chain *c, uint32_t n, uint64_t salt, uint32_t seed,
                uint32_t same, uint32_t seed_before);
uint32_t check_all(struct space *space);
uint32_t found(struct space *space, const struct chain *c);
struct kvd_pin_words *map_pins(struct attachment *a);
struct kvd_pinpage *page_of(struct kvd_pin_words *words);
int pidfd_of(pid_t pid);
struct attachment *attach_kept(struct space *space, pid_t pid);

#endif
