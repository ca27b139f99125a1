-- A store of schema 0001 with three pages, written by the migration and the statements of that revision.
CREATE TABLE public.prefixstore_changes (
    generation bigint NOT NULL,
    number integer NOT NULL,
    key bytea NOT NULL
);
CREATE TABLE public.prefixstore_meta (
    id smallint NOT NULL,
    magic character varying(16) NOT NULL,
    format integer NOT NULL,
    generation bigint NOT NULL
);
CREATE TABLE public.prefixstore_namespaces (
    key bytea NOT NULL,
    settings bytea NOT NULL
);
CREATE TABLE public.prefixstore_pages (
    key bytea NOT NULL,
    version smallint NOT NULL,
    codec smallint NOT NULL,
    start bigint NOT NULL,
    compute_us bigint NOT NULL,
    raw_bytes bigint NOT NULL,
    stored_bytes bigint NOT NULL,
    created bigint NOT NULL,
    namespace bytea NOT NULL,
    parent bytea NOT NULL,
    checksum bytea NOT NULL,
    tokens bytea NOT NULL,
    seal bytea NOT NULL,
    last_used bigint NOT NULL,
    hits bigint NOT NULL,
    pinned boolean NOT NULL
);
CREATE TABLE public.prefixstore_pieces (
    page bytea NOT NULL,
    number integer NOT NULL,
    data bytea NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.02', toast.autovacuum_vacuum_scale_factor='0.02');
ALTER TABLE ONLY public.prefixstore_pieces ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE TABLE public.prefixstore_schema (
    version_num character varying(32) NOT NULL
);
INSERT INTO public.prefixstore_changes VALUES (1, 0, '\xafeeb14f7d817e69006af9ff1c8e168c');
INSERT INTO public.prefixstore_changes VALUES (2, 0, '\x6a59ba1f06006671d9567590e8aeab2a');
INSERT INTO public.prefixstore_changes VALUES (3, 0, '\xa4cdc54b6040b58ca4fabb6ada7f332b');
INSERT INTO public.prefixstore_meta VALUES (1, 'prefixstore', 1, 3);
INSERT INTO public.prefixstore_namespaces VALUES ('\x000102030405060708090a0b0c0d0e0f', '\x7b226c6162656c223a22636f6e7472616374227d');
INSERT INTO public.prefixstore_pages VALUES ('\xafeeb14f7d817e69006af9ff1c8e168c', 1, 0, 0, 1000, 700, 700, 1700000000000000000, '\x000102030405060708090a0b0c0d0e0f', '\x000102030405060708090a0b0c0d0e0f', '\x6e4952423666129a7911f4758a0b07b3', '\x00000000010000000200000003000000', '\x2e72e7e0ccc2e09b', 1000, 0, false);
INSERT INTO public.prefixstore_pages VALUES ('\x6a59ba1f06006671d9567590e8aeab2a', 1, 0, 4, 1000, 900, 900, 1700000000000000000, '\x000102030405060708090a0b0c0d0e0f', '\xafeeb14f7d817e69006af9ff1c8e168c', '\xafce5d6bf8e3a73e8c23705a281b1334', '\x01000000020000000300000004000000', '\x2db7912a65e41219', 1001, 1, true);
INSERT INTO public.prefixstore_pages VALUES ('\xa4cdc54b6040b58ca4fabb6ada7f332b', 1, 0, 8, 1000, 0, 0, 1700000000000000000, '\x000102030405060708090a0b0c0d0e0f', '\x6a59ba1f06006671d9567590e8aeab2a', '\x99aa06d3014798d86001c324468d497f', '\x02000000030000000400000005000000', '\xbdfd85340fb9f352', 1002, 2, false);
INSERT INTO public.prefixstore_pieces VALUES ('\xafeeb14f7d817e69006af9ff1c8e168c', 0, '\x5f82c2d9cfeb0fa321d7d982f8bd1045b8e8cd4ea93d7d0a1df04213b6273b043b51de2c787a32d04e1c40a67959aae97fb2ed80717b4c9b459a82f85f49c0babf7fdca1e7012b8bedbf568f07e860ef4c3700474dc7dbd0b090beab6878b300f0f5e664bfd87edb1f95e78d7310990879d3cfc307b3cabaa627b9d849c4f72c0e7fdb163a4bf9dc2e79a805d9339d8a3812951420ebb94cf1d6267bcf3a356c0ca33a673df53f0768ca5e016007d11fa8eb1e02a90aaeabbbe28e863a36aea53166de41f0e0899d651a99c333b138621af5fe757d2649ff3fc513ce560618fb2d712861f3ad7faf3ec639f3c67f84a6bca51ed7800b3eb0af6939b4bc5a9063ba3b0ae03eaf952215043394b975b3b83b6a71d8f19e7d86184e1b60f5026c4f180d476cc1b45f7c43b304b88679b5e392a6ac12d2791def9c2006884c77985bd1a538ac6bc74f92edde2d414c086652a3d631b8f90b2498429421819e598156bc92bac28f244164ea4903541a05e9e3a3ba90430300273abc02d4b65531899fef8a6d0c91078215bc2c8c60b72a28d54fee9d6651467fc960ed0351d950473d041facca424561e06cfc4c149250fe0eaee9d7ab86c40b56b8a4da9213b7782616a42bdcd3704973af4a1ee549e8dbcb6c5591b4285e0b3b88bd5ac49a44510dabb7f19199b59067bc1524ff39c0d132e0724ff272973b171b3b889fcaa99094224221e68959774c1461eee637db07acee0af1e3b2711333e4281cc226532ef114d6700c28dc775dec81f2a217bd011b87849382583b0da18fae94c333005aedb444ea68a58ebc7030e76579e70a60f433e21c320b2cf97f70d6c10c7dc8db6cb10e00f20c4fc69e680f805902a5befe43d38f9a01f9edf268542e04ac84c5751d9abfd58184fac1c24a51680118577f1ef8946b71008187d27ff13a6e4029c94dbfe413c0e2266a55092848881d07bcacbdd1bfab750db669faa9ec');
INSERT INTO public.prefixstore_pieces VALUES ('\x6a59ba1f06006671d9567590e8aeab2a', 0, '\xffe42279f3bd068366a852c1bb9651f3cd18ec08f6a4e724d26facd2aeb0daf2a972cd3fa02fd44f487078de451f5f6c246dee453351e4d3ca3aca414c46c1682afad1a4022cb28c6202f315321d0e07353297dd2e3ce6c0a49c7fd69ac2c38948994ad13a4c69540ad5e273a876d6c94519b91f242d9e4d2e0cda1f0c7018740b8216fa818e50225db52062a5693267552564e784a41534ecfd938092f72643f316130531e617c04597e00f4ddec84776fc8c7fc779357c4da6ef1dd79711fb0035c5bf742a2ff6de23941764d58bb90aa10b4bdcd78d8ab947c8ec8957e24619f2d2b9737d20290250945229084df82e59ce6b21121d84d8fcff4a685ea91d448fb26c4d069d9fa11da2745fb4d4c6d6d0e35ccac8ed9cb38cd5c5ba05d4eac762646d3ec2220ad56df1b73ea05187e3a541df5209977503723a5e5b24f60f213c097538152ea47a6723c54c2546da2a03003789fbca9727fdefcd0fbf95425f213a58b17902d75c05e29474526e82406a76ac2a9dc98276f81efb7296c6c0f27fdb0df237de253ce4898b810ed3d1b302ab1103e4ebae3e366ec2662f7fc9809993df5dc30d319ee0268ed7bc67cd2db9a55bd59afa3064c8bf7ae0a1e01459e15138ad27f0da379ae9aa40137ddc8e0d0bd732bc64e08bb37f4f4b13cf788e290f9e020928462e3260eb23c5d001906096d6');
INSERT INTO public.prefixstore_pieces VALUES ('\x6a59ba1f06006671d9567590e8aeab2a', 1, '\xf0f64da55c19dc403afb4bb88cc3bb693adde7d51cd28cff3125294811175478ad891837c3604ab1a838aba39bae34d8d31218cedbbf17fa6222b3f6556418e597cb88267010ce0a6545727bb071525847190ce5ca8503ccda2c376c3a2057936d9be9965c9e10e462054506da845e7dfedd67ac312dfb734b6449ebe18956f325d3aad35e29e476c974b1e286b1c212db0c0da91e36a2446d83dc3e5e76f2adb087bdc4dd2573e3e0503036aaa325df746dced4a0ba835022480e10447e99c5592b53d3c05beb75f1251d2a27d74c2531a20960216ad5c1a2c0155126301008c576fbb0c27685bef8e2b62d7c34788f390b7165c1f74f807db87d01eb2975a27eda3243f500ec8db607d36bee0f1e9c77a71d1bca55385d2dc516a21a0270c4257c6361a253450610ddacb972de35814dc363a77353cc284fe0646e2a6828e276b708ded157fb50689bd3a16a6e8a15d3236ecf926ca444e9db7f5740742ff71ae92d8b8089e1df3d83403284f30dc2e91b03ffacd2be13615e433ec0f19125fb10c2414b67a24fa795bc12daeed4e5');
INSERT INTO public.prefixstore_pieces VALUES ('\xa4cdc54b6040b58ca4fabb6ada7f332b', 0, '\x');
INSERT INTO public.prefixstore_schema VALUES ('0001');
ALTER TABLE ONLY public.prefixstore_changes
    ADD CONSTRAINT prefixstore_changes_pkey PRIMARY KEY (generation, number);
ALTER TABLE ONLY public.prefixstore_meta
    ADD CONSTRAINT prefixstore_meta_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.prefixstore_namespaces
    ADD CONSTRAINT prefixstore_namespaces_pkey PRIMARY KEY (key);
ALTER TABLE ONLY public.prefixstore_pages
    ADD CONSTRAINT prefixstore_pages_pkey PRIMARY KEY (key);
ALTER TABLE ONLY public.prefixstore_pieces
    ADD CONSTRAINT prefixstore_pieces_pkey PRIMARY KEY (page, number);
ALTER TABLE ONLY public.prefixstore_schema
    ADD CONSTRAINT prefixstore_schema_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.prefixstore_pieces
    ADD CONSTRAINT prefixstore_pieces_page_fkey FOREIGN KEY (page) REFERENCES public.prefixstore_pages(key) ON DELETE CASCADE;
